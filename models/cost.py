"""Count what a step of a decoder computes, moves and launches, and derive from it what its steps cost.

The counts are those of one device: matrix products, attention, activations between operators, and launches.
`Counts` has them for a decoder that `tensor` devices share, or for a stage of its layers. `step_costs` joins
them with the rates of a device to the coefficients from which `continuous_batching.step_time` starts. These
are straight lines through the roofline (Williams et al., CACM 2009); its kinks, such as tiles, belong to the
simulated device (`simulation.roofline`), which keeps a clock of its own. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from continuous_batching.step_time import UNKNOWN, Coefficients, StepCosts
from devices.rates import DeviceRates
from devices.shapes import DIVIDED_ROWS
from models.config import ROUTER_BYTES, Choosing, DecoderConfig, Mixer

# Operators of a layer if fused: norms, products, rotary, write, attention, gate, residuals
OPERATORS = 10
# Operators of a layer with a recurrent state: norms, products, convolution, decays and betas, lengths of
# queries and keys, the rule, its norm and gate, the MLP's gate, residuals
RECURRENT_OPERATORS = 17
# Further operators of a layer with an indexer: two products, norm, two rotations, write, scores and choice
INDEX_OPERATORS = 7
# Further operators of a layer with experts: the router, its choice, and the shared expert
MIXTURE_OPERATORS = 10
REDUCTIONS = 2  # sums over devices that share a layer
ENDS = 4  # operators before the first layer and after the last
SMALL_CHUNK = 128  # tokens of a prompt's chunk that costs little more than reading the weights
ACTIVATIONS = 12  # times that a layer's hidden states are read or written between its products
NORMED = 8  # those by its two norms and residual sums, which devices may divide by rows
JOINED_BYTES = 4  # bytes of a number of the parts that devices which divide a sequence exchange


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """A matrix product of a layer.

    Devices that share the layer cut its outputs, or its inputs, after which a sum over them follows; or its
    rows, in steps of many; or each of them computes it whole.
    """

    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs", "rows"] | None


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a model on one group of devices; the last group also has the LM head."""

    num_layers: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class StepProduct:
    """A matrix product of a step, as one device computes it, and how many times the step has it."""

    times: float
    rows: float
    inputs: float
    outputs: float
    dtype: str
    weight_bytes: float  # bytes of one weight
    dtype_bytes: int  # bytes of one number of the activations

    @property
    def operations(self) -> float:
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def num_bytes(self) -> float:
        """Bytes of the weights, of what is multiplied with them, and of the result."""
        return (
            self.inputs * self.outputs * self.weight_bytes
            + self.rows * (self.inputs + self.outputs) * self.dtype_bytes
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """What steps cost one of `tensor` devices that share each layer; `part` None is the whole model.

    `contexts` of them divide each page of the cache. Steps of `least_divided` tokens and more that are no
    captured graphs divide their rows between products, with a reduce-scatter and a gather in place of each
    sum; 0: none does.
    """

    config: DecoderConfig
    tensor: int = 1
    part: ModelPart | None = None
    contexts: int = 1
    least_divided: int = 0

    @property
    def held(self) -> ModelPart:
        """The part of the model that the devices hold."""
        return self.part or ModelPart(self.config.num_layers, has_head=True)

    @property
    def share(self) -> float:
        """The share of the model's layers that the devices hold."""
        return self.held.num_layers / self.config.num_layers

    @property
    def num_operators(self) -> int:
        """Operators that a step launches, where it is no captured graph."""
        of_layer = OPERATORS + (REDUCTIONS if self.tensor > 1 else 0)
        experts = round(self.share * self.config.num_mixtures) * MIXTURE_OPERATORS
        states = round(self.share * self.config.num_recurrent) * (RECURRENT_OPERATORS - OPERATORS)
        indexers = round(self.share * self.config.num_indexers) * INDEX_OPERATORS
        return self.held.num_layers * of_layer + ENDS + experts + states + indexers

    def divides(self, num_tokens: float, *, is_graph: bool) -> bool:
        """Whether devices divide the rows of such a step between products."""
        return self.tensor > 1 and not is_graph and 0 < self.least_divided <= num_tokens

    def launches(self, *, divides: bool) -> int:
        """Return the operators of a step; one that `divides` rows has a gather more for each sum.

        The choices of a router are gathered too.
        """
        if not divides:
            return self.num_operators
        num_mixtures = round(self.share * self.config.num_mixtures)
        return self.num_operators + self.held.num_layers * REDUCTIONS + num_mixtures

    def sums_s(self, device: DeviceRates, num_tokens: float, *, divides: bool) -> float:
        """Return the seconds of the sums over devices, each of which is half a scatter and half a gather.

        What linears in int8 read is gathered in int8, but for experts, whose router reads it too.
        """
        sum_s = device.all_reduce_s(self.hidden_bytes(num_tokens), self.tensor)
        both_s = REDUCTIONS * self.held.num_layers * sum_s
        if not divides or not self.config.is_int8:
            return both_s
        narrow_s = device.all_reduce_s(num_tokens * self.config.hidden_size, self.tensor)
        num_narrow = sum(each.mixer != "recurrent" and each.index is None for each in self.config.layers)
        num_narrow += self.config.num_layers - self.config.num_mixtures
        return both_s - self.share * num_narrow * (sum_s - narrow_s) / 2

    def joined_bytes(self, num_rows: float) -> tuple[float, float]:
        """Return the bytes that a layer sends devices which divide a sequence, for rows of short spans.

        Their queries are gathered, and then the parts of their outputs exchanged, with sums in float32.
        """
        config, latent = self.config, self.config.latent
        query, output = config.head_dim, config.head_dim
        if latent is not None:
            query, output = latent.rank + latent.rope_dim, latent.rank
        heads = self.contexts * -(-config.num_heads // self.tensor)
        numbers = (self.contexts - 1) / self.contexts * num_rows * heads
        return numbers * query * config.dtype_bytes, numbers * (output + 1) * JOINED_BYTES

    def contexts_s(self, device: DeviceRates, num_rows: float, context: float) -> float:
        """Return the seconds of what devices that divide a sequence send each other in a step.

        `num_rows` tokens of short spans ask all of them. `context` tokens of longer spans, summed over the
        layers, are gathered.
        """
        if self.contexts == 1:
            return 0.0
        taken_s = 0.0
        if num_rows:
            taken_s += self.held.num_layers * sum(map(device.send_s, self.joined_bytes(num_rows)))
        if context:
            others = (self.contexts - 1) / self.contexts
            gathered = others * self.share * context * self.config.kv_head_bytes
            taken_s += device.send_s(gathered) + 2 * gathered / device.bytes_per_s
        return taken_s

    def hidden_bytes(self, num_tokens: float) -> float:
        """Return the bytes of the hidden states of tokens at one place of a layer."""
        return num_tokens * self.config.hidden_size * self.config.dtype_bytes

    def activation_bytes(self, num_tokens: float, *, divides: bool = False) -> float:
        """Return the bytes that the operators between products read and write."""
        saved = NORMED * (1 - 1 / self.tensor) if divides else 0.0
        return self.held.num_layers * (ACTIVATIONS - saved) * self.hidden_bytes(num_tokens)

    def products(self, num_tokens: float, num_sampled: float) -> Iterator[StepProduct]:
        """Yield the products of a step of so many tokens, of which some are sampled from."""
        config, share = self.config, self.share
        own = config.dtype, config.dtype_bytes
        stored: tuple[str, float] = ("int8", 1) if config.is_int8 else own
        if config.kept_form is not None:  # weights are dequantised as they are multiplied
            stored = config.dtype, config.kept_form.weight_bytes(config.dtype_bytes)
        num_mixtures = config.num_mixtures
        for count, products in mixer_products(config):
            for each in products:
                yield self._cut(share * count, num_tokens, each, *stored)
        for each in mlp_products(config.hidden_size, config.intermediate_size):
            yield self._cut(share * (config.num_layers - num_mixtures), num_tokens, each, *stored)
        if num_mixtures:
            yield from self._mixture(share * num_mixtures, num_tokens, *stored)
        if num_sampled and self.held.has_head:
            yield self._product(1, num_sampled, config.hidden_size, config.vocab_size / self.tensor, *own)

    def _mixture(
        self, times: float, num_tokens: float, dtype: str, weight_bytes: float
    ) -> Iterator[StepProduct]:
        """Yield the products of one layer's experts.

        They comprise the router, the experts that some token chooses if all are equally likely, and the
        shared expert.
        """
        mixture, hidden = self.config.mixture, self.config.hidden_size
        assert mixture is not None, "the model has experts"
        chosen, count = mixture.num_chosen, mixture.num_experts
        num_used = count * (1 - (1 - chosen / count) ** num_tokens)
        rows = num_tokens * chosen / num_used
        yield self._product(times, num_tokens, hidden, count, self.config.dtype, ROUTER_BYTES)
        for each in mlp_products(hidden, mixture.inner_size):
            yield self._cut(times * num_used, rows, each, dtype, weight_bytes)
        for each in mlp_products(hidden, mixture.shared_size) if mixture.shared_size else ():
            yield self._cut(times, num_tokens, each, dtype, weight_bytes)

    def _cut(
        self, times: float, rows: float, product: LayerProduct, dtype: str, weight_bytes: float
    ) -> StepProduct:
        if product.cut == "rows" and self.divides_choice(rows):
            rows /= self.tensor
        inputs = product.inputs / (self.tensor if product.cut == "inputs" else 1)
        outputs = product.outputs / (self.tensor if product.cut == "outputs" else 1)
        return self._product(times, rows, inputs, outputs, dtype, weight_bytes)

    def _product(
        self, times: float, rows: float, inputs: float, outputs: float, dtype: str, weight_bytes: float
    ) -> StepProduct:
        return StepProduct(times, rows, inputs, outputs, dtype, weight_bytes, self.config.dtype_bytes)

    def attention(self, num_tokens: float, context: float, pairs: float) -> tuple[float, float]:
        """Return the operations and the bytes of attention in all layers of the model.

        `context` is the number of tokens whose keys are read, `pairs` that of scores, both summed over the
        layers; the keys and values of the step's own tokens are written. Of a token that several queries of
        sparse attention read, each gathers its own copy.
        """
        config = self.config
        heads = -(-config.num_heads // self.tensor)
        kv_heads = -(-config.num_kv_heads // self.tensor)
        read = config.attended_head_bytes * context
        written = config.kv_head_bytes * len(config.attention_windows) * num_tokens
        return heads * attention_operations(config, context, pairs), kv_heads * (read + written)

    def divides_choice(self, num_tokens: float) -> bool:
        """Whether the devices divide the rows of a step with sparse attention, instead of its heads."""
        return self.tensor > 1 and num_tokens >= DIVIDED_ROWS * self.tensor

    def indexers(self, num_tokens: float, context: float, pairs: float) -> tuple[float, float]:
        """Return the operations and the bytes of the indexers of all layers of the model.

        `context` and `pairs` are those of `attention`, summed over the layers with an indexer. Every device
        computes all index heads, of its rows if the step has many tokens.
        """
        config, ways = self.config, self.tensor if self.divides_choice(num_tokens) else 1
        return index_operations(config, pairs) / ways, config.index_key_bytes * context

    def exchanged_bytes(self, num_tokens: float) -> float:
        """Return the bytes that a device exchanges in a layer where the devices divide its rows.

        These are the queries of its heads in the space of latents, and what they attended to.
        """
        latent = self.config.latent
        assert latent is not None, "sparse attention reads latents"
        heads = -(-self.config.num_heads // self.tensor)
        return num_tokens * heads * (2 * latent.rank + latent.rope_dim) * self.config.dtype_bytes

    def state_bytes(self, num_spans: float) -> float:
        """Return the bytes of recurrent states that so many spans move: each is read and written."""
        return 2 * num_spans * self.share * self.config.state_bytes / self.tensor


def mixer_products(config: DecoderConfig) -> Iterator[tuple[int, tuple[LayerProduct, ...]]]:
    """Yield for each kind of mixer how many layers have it, and its products."""
    layers: dict[tuple[Mixer, Choosing | None], list[int]] = {}
    for layer, spec in enumerate(config.layers):
        layers.setdefault((spec.mixer, spec.index), []).append(layer)
    for found in layers.values():
        yield len(found), attention_products(config, found[0])


def attention_products(config: DecoderConfig, layer: int) -> tuple[LayerProduct, ...]:
    """Return the products of a layer's attention.

    Products that read the hidden state are joined into one, except those that every device computes whole.
    """
    mixer, hidden = config.layers[layer].mixer, config.hidden_size
    if mixer == "attention":
        heads, kv_heads = config.num_heads * config.query_dim, config.num_kv_heads * config.head_dim
        return (
            LayerProduct(hidden, heads + 2 * kv_heads, "outputs"),
            LayerProduct(config.num_heads * config.head_dim, hidden, "inputs"),
        )
    index = config.index_of(layer)
    whole = ["q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj"]
    whole += () if index is None else index.first()
    cuts: dict[str, Literal["inputs", "rows"] | None] = {
        **dict.fromkeys(whole),
        **dict.fromkeys(("o_proj", "out_proj"), "inputs"),
        "indexer.wq_b": "rows",
    }
    return tuple(
        LayerProduct(inputs, outputs, cuts.get(name, "outputs"))
        for name, inputs, outputs in config.mixer_linears(layer)
    )


def mlp_products(hidden: int, inner: int) -> tuple[LayerProduct, ...]:
    """Return the products of a SwiGLU of this width."""
    return LayerProduct(hidden, 2 * inner, "outputs"), LayerProduct(inner, hidden, "inputs")


def attention_operations(config: DecoderConfig, context: float, pairs: float) -> float:
    """Return the operations of one head's attention.

    For latents this is the cheaper of both forms, without projecting the step's own tokens into their space
    or out of it.
    """
    latent = config.latent
    if latent is None:
        return 4 * config.head_dim * pairs
    absorbed = 2 * (2 * latent.rank + latent.rope_dim) * pairs
    expanded = 2 * (latent.query_dim + latent.value_dim) * pairs
    return min(absorbed, expanded + expansion_operations(config) * context)


def expansion_operations(config: DecoderConfig) -> float:
    """Return the operations by which one head expands the latent of a token; 0 where there is none."""
    latent = config.latent
    return 0.0 if latent is None else 2.0 * latent.rank * (latent.nope_dim + latent.value_dim)


def index_operations(config: DecoderConfig, pairs: float) -> float:
    """Return the operations of all index heads for so many scores."""
    index = None if config.latent is None else config.latent.index
    return 0.0 if index is None else 2 * index.num_heads * index.head_dim * pairs


def step_costs(
    counts: Counts, device: DeviceRates, most_decodes: int, most_tokens: int, *, graphs: int = 0
) -> StepCosts:
    """Return the seconds of a step for each unit of what it computes; `UNKNOWN` where a rate is.

    Steps of up to `graphs` decodes are captured graphs. The lines go through the times of two sizes: a step
    of one decode and one of `most_decodes`, drafts included; a chunk of SMALL_CHUNK and one of `most_tokens`.
    Layers with a window, or with sparse attention, read a bounded number of tokens, which is left out; the
    indexers of the latter score all of them, and the devices divide the scores of a chunk.
    """
    config = counts.config
    needed = {config.dtype, *(each.dtype for each in counts.products(1, 1))}
    if not needed <= set(device.tflop_per_s):
        return UNKNOWN
    growing = counts.share * sum(reach is None for reach in config.reaches)
    indexers = counts.share * config.num_indexers
    read_bytes = growing * -(-config.num_kv_heads // counts.tensor) * config.kv_head_bytes
    read_bytes += indexers * config.index_key_bytes
    heads = growing * -(-config.num_heads // counts.tensor)
    operations = heads * attention_operations(config, 1, 1)
    operations += indexers * index_operations(config, 1)
    few, many = 1, max(2, most_decodes)
    decode_s, decodes_s = (
        _step_s(counts, device, each, each, graphs) + counts.contexts_s(device, each, 0)
        for each in (few, many)
    )
    token_s = max(0.0, (decodes_s - decode_s) / (many - few))
    decodes = Coefficients(
        step_s=max(0.0, decode_s - few * token_s),
        token_s=token_s,
        context_s=device.operator_s(operations, config.dtype, read_bytes / counts.contexts),
    )
    few, many = min(SMALL_CHUNK, max(1, most_tokens // 2)), max(2, most_tokens)
    chunk_s, largest_s = (_step_s(counts, device, each, 1, 0) for each in (few, many))
    token_s = max(0.0, (largest_s - chunk_s) / (many - few))
    pair = heads * attention_operations(config, 0, 1)  # latents count as expanded
    pair += indexers * index_operations(config, 1) / counts.tensor
    prompts = Coefficients(
        step_s=max(0.0, chunk_s - few * token_s),
        token_s=token_s,
        context_s=read_bytes / device.bytes_per_s
        + heads * expansion_operations(config) / device.flop_per_s(config.dtype)
        + counts.contexts_s(device, 0, 2 * growing)
        - counts.contexts_s(device, 0, growing),
        pair_s=pair / device.flop_per_s(config.dtype),
    )
    return StepCosts(decodes, prompts)


def _step_s(counts: Counts, device: DeviceRates, num_tokens: int, num_sampled: int, graphs: int) -> float:
    """Return the seconds of a step without attention: products, activations, sums over devices, launches.

    Each span is taken to yield one token, and moves its recurrent states.
    """
    busy_s = sum(
        each.times * device.operator_s(each.operations, each.dtype, each.num_bytes)
        for each in counts.products(num_tokens, num_sampled)
    )
    divides = counts.divides(num_tokens, is_graph=num_tokens <= graphs)
    launches = counts.launches(divides=divides)
    moved = counts.activation_bytes(num_tokens, divides=divides) + counts.state_bytes(num_sampled)
    busy_s += moved / device.bytes_per_s
    busy_s += counts.sums_s(device, num_tokens, divides=divides) + launches * device.kernel_us * 1e-6
    host_s = 1e-6 * (device.host_us + device.row_us * num_sampled)
    if num_tokens <= graphs:
        return host_s + busy_s + device.graph_us * 1e-6
    return host_s + max(busy_s, launches * device.launch_us * 1e-6)
