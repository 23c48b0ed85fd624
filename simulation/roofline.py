"""Model the time of a step by what it multiplies, reads, sends and launches.

Each product takes the longer of its multiplications, in whole tiles, and of reading its weights, or the sum
of both on a device that does not read ahead; attention takes the same of its scores and of the keys and
values that it reads; the operators between them read and write the activations. Operators run one after the
other: only the host's launches overlap with the device's work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from models.config import ROUTER_BYTES, DecoderConfig
from simulation.device import SimulatedDevice

# Operators of a layer if fused: norms, products, rotary, write, attention, gate, residuals
OPERATORS = 10
# Further operators of a layer with experts: the router, its choice, and the shared expert
MIXTURE_OPERATORS = 10
MOST_SIZES = 2**16  # step sizes whose times are kept
ACTIVATIONS = 12  # times that a layer's hidden states are read or written between its products


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """A matrix product of a layer.

    Devices that share the layer cut its outputs, or its inputs, after which a sum over them follows; or each
    of them computes it whole.
    """

    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs"] | None


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a model on one group of devices; the last group also has the LM head."""

    num_layers: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class _Size:
    """The parts of a step's time that depend on its numbers of tokens, spans and samples alone."""

    share: float  # share of the model's layers
    products_s: float
    activations_s: float
    all_reduce_s: float
    kernels_s: float
    is_graph: bool
    launch_s: float


@dataclass(slots=True)
class Roofline:
    """A cost model for `tensor` devices that share each layer; with `stage` None they hold the whole model.

    Steps of decodes alone run as captured graphs up to `graphs` rows, others operator by operator. With
    `hides_host` the host does its work between steps while the device computes.
    """

    config: DecoderConfig
    device: SimulatedDevice
    tensor: int = 1
    graphs: int = 0
    hides_host: bool = False
    stage: ModelPart | None = None
    _sizes: dict[tuple[int, int, int], _Size] = field(default_factory=dict)
    # Window, and the number of layers that have it
    _windows: list[tuple[int | None, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._windows = list(Counter(self.config.windows).items())

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of the whole step, including the pages that are copied before it."""
        num_tokens = batch.num_tokens
        seen = self.seen(batch, num_tokens)
        captured = batch.num_spans + batch.num_drafts  # number of tokens of a step without prompts
        taken_s = self.time_s(num_tokens, captured, len(batch.owners), *seen)
        return taken_s + self._copies_s(batch, slots) if batch.copies else taken_s

    def seen(self, batch: Batch, num_tokens: int) -> tuple[float, float]:
        """Return the tokens whose keys are read and the scored pairs, summed over all layers."""
        starts, stops = batch.starts, batch.stops
        total = int(stops.sum())
        if self._windows == [(None, self.config.num_layers)] and num_tokens == batch.num_spans:
            return float(self.config.num_layers * total), float(self.config.num_layers * total)
        lens = stops - starts
        context = pairs = 0.0
        for window, count in self._windows:
            if window is None:
                context += count * float(total)
                pairs += count * float((lens * (starts + stops + 1)).sum()) / 2
            else:
                near = np.minimum(stops, window + lens)
                context += count * float(near.sum())
                # Positions where a window is not full yet
                first, last = np.minimum(starts, window), np.minimum(stops, window)
                growing = (last * (last + 1) - first * (first + 1)) / 2
                pairs += count * float((growing + window * (lens - (last - first))).sum())
        return context, pairs

    def time_s(self, num_tokens: int, captured: int, num_sampled: int, context: float, pairs: float) -> float:
        """Return the seconds of a step of these sizes, which is a graph if all tokens are `captured` ones.

        `context` and `pairs` are as `seen` returns them.
        """
        key = num_tokens, captured, num_sampled
        size = self._sizes.get(key)
        if size is None:
            size = self._size(*key)
            if len(self._sizes) < MOST_SIZES:
                self._sizes[key] = size
        busy_s = size.products_s + size.share * self._attention_s(num_tokens, context, pairs)
        busy_s += size.activations_s
        busy_s += size.all_reduce_s
        busy_s += size.kernels_s
        host_s = 0.0 if self.hides_host else 1e-6 * (self.device.host_us + self.device.row_us * num_sampled)
        return host_s + (busy_s + size.launch_s if size.is_graph else max(busy_s, size.launch_s))

    def _copies_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of page copies: each byte is read and written.

        Copies to the host count the same.
        """
        share = self.stage.num_layers / self.config.num_layers if self.stage else 1.0
        held_bytes = self.config.kv_bytes_per_token(self.tensor) * share
        num_bytes = batch.num_copied_pages * slots.page_size * held_bytes
        return 2 * num_bytes / self.device.bytes_per_s

    def _size(self, num_tokens: int, captured: int, num_sampled: int) -> _Size:
        config, device = self.config, self.device
        stage = self.stage or ModelPart(config.num_layers, has_head=True)
        share = stage.num_layers / config.num_layers
        operators = stage.num_layers * (OPERATORS + (2 if self.tensor > 1 else 0)) + 4
        operators += round(share * config.num_mixtures) * MIXTURE_OPERATORS
        hidden_bytes = num_tokens * config.hidden_size * config.dtype_bytes
        is_graph = num_tokens == captured <= self.graphs
        return _Size(
            share=share,
            products_s=self._products_s(num_tokens, num_sampled if stage.has_head else 0, stage.num_layers),
            activations_s=stage.num_layers * ACTIVATIONS * hidden_bytes / device.bytes_per_s,
            all_reduce_s=2 * stage.num_layers * device.all_reduce_s(hidden_bytes, self.tensor),
            kernels_s=operators * device.kernel_us * 1e-6,
            is_graph=is_graph,
            launch_s=(device.graph_us if is_graph else operators * device.launch_us) * 1e-6,
        )

    def _products_s(self, num_tokens: int, num_sampled: int, num_layers: int) -> float:
        config, whole = self.config, self.config.num_layers
        own = config.dtype, config.dtype_bytes
        stored: tuple[str, float] = own if config.quantization is None else ("int8", 1)
        if config.kept_form is not None:  # weights are dequantised as they are multiplied
            stored = config.dtype, config.kept_form.weight_bytes(config.dtype_bytes)
        each_s = sum(self._cut_product_s(num_tokens, each, *stored) for each in attention_products(config))
        num_mixtures = config.num_mixtures
        sum_s = whole * each_s + (whole - num_mixtures) * sum(
            self._cut_product_s(num_tokens, each, *stored)
            for each in mlp_products(config.hidden_size, config.intermediate_size)
        )
        if num_mixtures:
            sum_s += num_mixtures * self._mixture_s(num_tokens, *stored)
        layers_s = num_layers / whole * sum_s
        if not num_sampled:
            return layers_s
        return layers_s + self._product_s(
            num_sampled, config.hidden_size, config.vocab_size / self.tensor, *own
        )

    def _mixture_s(self, num_tokens: int, dtype: str, weight_bytes: float) -> float:
        """Return the seconds of one layer's experts.

        They comprise the router, the experts that some token chooses if all are equally likely, and the
        shared expert.
        """
        mixture, hidden = self.config.mixture, self.config.hidden_size
        assert mixture is not None, "the model has experts"
        chosen, count = mixture.num_chosen, mixture.num_experts
        num_used = count * (1 - (1 - chosen / count) ** num_tokens)
        rows = num_tokens * chosen / num_used
        one_s = sum(
            self._cut_product_s(rows, each, dtype, weight_bytes)
            for each in mlp_products(hidden, mixture.inner_size)
        )
        router_s = self._product_s(num_tokens, hidden, count, self.config.dtype, ROUTER_BYTES)
        shared = mlp_products(hidden, mixture.shared_size) if mixture.shared_size else ()
        shared_s = sum(self._cut_product_s(num_tokens, each, dtype, weight_bytes) for each in shared)
        return router_s + num_used * one_s + shared_s

    def _cut_product_s(self, rows: float, product: LayerProduct, dtype: str, weight_bytes: float) -> float:
        inputs = product.inputs / (self.tensor if product.cut == "inputs" else 1)
        outputs = product.outputs / (self.tensor if product.cut == "outputs" else 1)
        return self._product_s(rows, inputs, outputs, dtype, weight_bytes)

    def _product_s(
        self, rows: float, inputs: float, outputs: float, dtype: str, weight_bytes: float
    ) -> float:
        height, width = self.device.tile
        operations = 2 * (-(-rows // height) * height) * inputs * (-(-outputs // width) * width)
        read = inputs * outputs * weight_bytes + rows * (inputs + outputs) * self.config.dtype_bytes
        return self.device.operator_s(operations, dtype, read)

    def _attention_s(self, num_tokens: int, context: float, pairs: float) -> float:
        config, device = self.config, self.device
        heads = -(-config.num_heads // self.tensor)
        kv_heads = -(-config.num_kv_heads // self.tensor)
        moved = kv_heads * config.kv_head_bytes * (context + config.num_layers * num_tokens)
        operations = heads * attention_operations(config, context, pairs)
        return device.operator_s(operations, config.dtype, moved)


def attention_products(config: DecoderConfig) -> tuple[LayerProduct, ...]:
    """Return the products of a layer's attention.

    Products that read the hidden state are joined into one, except those that every device computes whole.
    """
    if config.latent is None:
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return (
            LayerProduct(config.hidden_size, heads + 2 * kv_heads, "outputs"),
            LayerProduct(heads, config.hidden_size, "inputs"),
        )
    whole = ("q_a_proj", "kv_a_proj_with_mqa")
    return tuple(
        LayerProduct(inputs, outputs, None if name in whole else "inputs" if name == "o_proj" else "outputs")
        for name, inputs, outputs in config.attention_linears()
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
    up = latent.rank * (latent.nope_dim + latent.value_dim)
    absorbed = 2 * (2 * latent.rank + latent.rope_dim) * pairs
    expanded = 2 * (latent.query_dim + latent.value_dim) * pairs + 2 * up * context
    return min(absorbed, expanded)
