"""Which decoder is it: its sizes, its options, its rotary embedding?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from models.latent_config import LatentConfig
from models.mixture_config import MLP_ROLES, MixtureConfig
from models.packing import Int4, Packing
from models.quantization import BlockScales, Quantization
from models.rope_config import RopeConfig

DType = Literal["float32", "bfloat16", "float16"]
Gate = Literal["silu", "gelu_tanh", "clamped"]
# How a linear is stored; with "quantize", in the model's type, and in int8 from loading on
Form = Literal["plain", "int8", "quantize"] | Int4

DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# Size of a float32 scale: one for each int8 output channel, and for each head in an int8 cache
SCALE_BYTES = 4

ROUTER_BYTES = 4  # size of a router's weight, which is kept in float32
FUSED = ("q_proj", "k_proj", "v_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")  # norms before attention and before the MLP
QKV, GATE_UP = "qkv_proj", "gate_up_proj"  # names of linears that a checkpoint stores as one
UP = ".kv_b_proj"  # a linear of latent attention, held in the model's type however it is stored


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: RMS norms before attention and MLP, rotary embedding, SwiGLU, some of it by experts.

    `windows` has one entry a layer: how many positions a query sees, itself included; None for all. With
    `latent` attention, `num_kv_heads` is 1 and `head_dim` is the latent's width, as the cache holds it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    attention_bias: bool  # q, k and v have a bias
    output_bias: bool  # the output projection of attention has a bias
    mlp_bias: bool
    qk_norm: bool
    dtype: DType
    max_positions: int
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    int8_cache: bool = False  # keys and values are int8, with a float32 scale for each token and head
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    # Form of stored weights that are converted to the model's type when they are read
    stored_form: BlockScales | Packing | None = None
    kept_form: Packing | None = None  # form of linears that stay in 4 bits
    stored_joined: tuple[str, ...] = ()  # QKV, GATE_UP: linears that the checkpoint stores as one
    # Names of a layer's norms in a checkpoint; a third and a fourth are applied to the outputs of attention
    # and MLP
    norms: tuple[str, ...] = NORMS
    norms_add_one: bool = False  # 1 is added to the norm weights of the checkpoint
    gate: Gate = "silu"  # activation of the MLP's gate
    gate_slope: float = 1.702  # slope of the sigmoid of a clamped gate
    gate_limit: float = 7.0  # limit to which a clamped gate, and what it multiplies, are clipped
    embedding_scale: float = 1.0
    score_cap: float | None = None  # attention scores are cap * tanh(score / cap)
    logit_cap: float | None = None  # the same for logits
    has_sinks: bool = False  # each query head has an attention score that belongs to no key
    own_scale: float | None = None  # scale of attention scores; None: head_dim**-0.5
    window_rope: RopeConfig | None = None  # rotary embedding of layers with a window, if it differs
    # Layers that a checkpoint may have behind its own, to predict further tokens; they are not read here
    num_unread_layers: int = 0

    def form(self, name: str) -> Form:
        """Return how the linear with this checkpoint name is stored.

        A tied head is stored as the embedding is.
        """
        quantization = self.quantization
        is_tied = name == "lm_head" and self.tie_embeddings
        if self.kept_form is not None and self.kept_form.covers(name):
            return Int4(self.kept_form.group_size, self.kept_form.has_zeros)
        if quantization is None or is_tied or not quantization.covers(name):
            return "plain"
        return "int8" if quantization.is_stored else "quantize"

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear."""
        hidden = self.hidden_size
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, inputs, outputs in self.attention_linears():
                yield f"{prefix}self_attn.{name}", inputs, outputs
            inner = self.inner_size(layer)
            for gate, up, down in self.mlp_names(layer):
                yield gate, hidden, inner
                yield up, hidden, inner
                yield down, inner, hidden
            if shared := self.shared_names(layer):
                yield shared[0], hidden, self.shared_size
                yield shared[1], hidden, self.shared_size
                yield shared[2], self.shared_size, hidden
        if not self.tie_embeddings:
            yield "lm_head", hidden, self.vocab_size

    def attention_linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of every linear of a layer's attention."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        if self.latent is not None:
            yield from self.latent.linears(hidden, self.num_heads)
            return
        yield "q_proj", hidden, heads
        yield "k_proj", hidden, self.num_kv_heads * self.head_dim
        yield "v_proj", hidden, self.num_kv_heads * self.head_dim
        yield "o_proj", heads, hidden

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The attention linears that read the hidden state, which are multiplied as one."""
        return FUSED if self.latent is None else self.latent.first()

    @property
    def query_dim(self) -> int:
        """Width of a query head as its linear computes it."""
        return self.head_dim if self.latent is None else self.latent.query_dim

    @property
    def value_dim(self) -> int:
        """Width of a head as the output projection takes it."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def scale(self) -> float:
        """Scale of attention scores."""
        own = self.head_dim**-0.5 if self.own_scale is None else self.own_scale
        return own if self.latent is None else self.latent.scale

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """The mixture of experts of a layer; None if it has a dense MLP."""
        return self.mixture if self.mixture is not None and self.mixture.layers[layer] else None

    def inner_size(self, layer: int) -> int:
        """Inner size of the MLP of a layer, or of each of its experts."""
        mixture = self.mixture_of(layer)
        return self.intermediate_size if mixture is None else mixture.inner_size

    def mlp_names(self, layer: int, name: str = "") -> list[tuple[str, str, str]]:
        """Return the checkpoint names of gate, up and down of a layer's MLP, or of its experts on this rank.

        `name` is the layer's prefix, if it is not counted from the first layer of the checkpoint.
        """
        prefix, mixture = name or f"model.layers.{layer}.", self.mixture_of(layer)
        if mixture is None:
            return [_joined(f"{prefix}mlp.", MLP_ROLES)]
        experts = f"{prefix}{mixture.block}.experts."
        return [_joined(f"{experts}{number}.", mixture.roles) for number in mixture.held_in(layer)]

    @property
    def shared_size(self) -> int:
        """Inner size of the shared expert, which computes every token; 0 if there is none."""
        return 0 if self.mixture is None else self.mixture.shared_size

    def shared_names(self, layer: int, name: str = "") -> tuple[str, str, str] | None:
        """Return gate, up and down of the shared expert, as `mlp_names`; None if the layer has none."""
        mixture = self.mixture_of(layer)
        if mixture is None or not mixture.shared_size:
            return None
        prefix = name or f"model.layers.{layer}."
        return _joined(f"{prefix}{mixture.block}.{mixture.shared_block}.", MLP_ROLES)

    @property
    def num_mixtures(self) -> int:
        """Number of layers that have a mixture of experts."""
        return 0 if self.mixture is None else sum(self.mixture.layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes that the cache holds of one head of a token in one layer.

        These are a key and a value, or what latent attention has in their place.
        """
        width = 2 * self.head_dim if self.latent is None else self.latent.token_width
        return width + 2 * SCALE_BYTES if self.int8_cache else width * self.dtype_bytes

    def kv_bytes_per_token(self, num_devices: int = 1) -> int:
        """Return the bytes of a token's keys and values over all layers, on each device that shares them.

        With more devices than key-value heads, several devices hold the same head.
        """
        num_heads = -(-self.num_kv_heads // num_devices)
        return self.num_layers * num_heads * self.kv_layer_bytes

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of keys and values of all layers, for the tokens of one page."""
        return page_size * self.kv_bytes_per_token()

    @property
    def growing_kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that a step reads for each token of context, however long the context is.

        Layers with a window are left out, because they read a bounded number of tokens.
        """
        num_growing = sum(window is None for window in self.windows)
        return self.kv_bytes_per_token() * num_growing // max(1, self.num_layers)

    @property
    def step_weight_bytes(self) -> int:
        """The least bytes of weights that a step reads.

        Only few rows are read of an embedding that is not the head, and of each mixture only the experts that
        one token chooses.
        """
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size * self.dtype_bytes
        return self.weight_bytes - embedding - self.bytes_of_experts(self._num_idle)

    @property
    def _num_idle(self) -> int:
        """Number of experts of a layer that one token does not choose."""
        return 0 if self.mixture is None else max(0, self.mixture.num_held - self.mixture.num_chosen)

    def bytes_of_experts(self, count: int) -> int:
        """Return the bytes of `count` experts in every layer that has experts."""
        total = 0
        for layer in range(self.num_layers):
            mixture = self.mixture_of(layer)
            if mixture is not None:
                gate, down = (self.form(name) for name in self.mlp_names(layer)[0][::2])
                size, hidden = mixture.inner_size, self.hidden_size
                total += count * 2 * size * self._row_bytes(gate, hidden)
                total += count * hidden * self._row_bytes(down, size)
        return total

    def _row_bytes(self, form: Form, inputs: int) -> int:
        """Return the bytes of one output channel of a linear, including its scale."""
        if isinstance(form, Int4):
            return form.row_bytes(inputs, self.dtype_bytes)
        return inputs * self.dtype_bytes if form == "plain" else inputs + SCALE_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the device holds them, including scales."""
        total = self.num_parameters * self.dtype_bytes
        total += self._router_parameters * (ROUTER_BYTES - self.dtype_bytes)
        for name, inputs, outputs in self.linears():
            if not name.endswith(UP):
                total += outputs * (self._row_bytes(self.form(name), inputs) - inputs * self.dtype_bytes)
        return total

    @property
    def max_shared_positions(self) -> int | None:
        """Number of positions whose keys depend on the tokens alone; None for all.

        Under dynamic RoPE a prompt longer than this rotates all its keys by a base of its own, so such a
        request can share nothing, and any other request only positions below this.
        """
        return self.rope.original_max_positions if self.rope.kind == "dynamic" else None

    @property
    def num_parameters(self) -> int:
        """Number of weights of the whole decoder, each tied one counted once."""
        attention_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = sum(inputs * outputs for _, inputs, outputs in self.attention_linears())
        layer += len(self.norms) * self.hidden_size
        layer += 0 if self.latent is None else self.latent.norm_width
        layer += self.attention_bias * (attention_dim + 2 * kv_dim) + self.output_bias * self.hidden_size
        layer += self.qk_norm * 2 * self.head_dim + self.has_sinks * self.num_heads
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        mlps = (self.num_layers - self.num_mixtures) * mlp + self._router_parameters
        if self.mixture is not None:
            of_each = self.mixture.num_held * self._expert_parameters
            of_each += (3 * self.shared_size + self.mixture.has_shared_gate) * self.hidden_size
            mlps += self.num_mixtures * of_each
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + mlps + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that a token is multiplied with.

        Of each mixture, only the chosen experts count.
        """
        if self.mixture is None:
            return self.num_parameters
        return self.num_parameters - self.num_mixtures * self._num_idle * self._expert_parameters

    @property
    def _expert_parameters(self) -> int:
        if self.mixture is None:
            return 0
        inner, hidden = self.mixture.inner_size, self.hidden_size
        return 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)

    @property
    def _router_parameters(self) -> int:
        """Number of weights of all routers, their biases and their choice corrections."""
        mixture = self.mixture
        if mixture is None:
            return 0
        return (
            self.num_mixtures
            * mixture.num_experts
            * (self.hidden_size + mixture.is_corrected + mixture.is_biased)
        )


def _joined(prefix: str, roles: tuple[str, str, str]) -> tuple[str, str, str]:
    gate, up, down = roles
    return prefix + gate, prefix + up, prefix + down


def check_fused(config: DecoderConfig) -> None:
    """Raise ValueError if only some of the linears that are multiplied as one are quantised."""
    if config.quantization is None and config.kept_form is None:
        return
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shared = config.shared_names(layer)
        joined = [
            tuple(f"{prefix}self_attn.{name}" for name in config.first_linears),
            *(each[:2] for each in [*config.mlp_names(layer), *([shared] if shared else [])]),
        ]
        for names in joined:
            if len({config.form(name) for name in names}) > 1:
                plain = ", ".join(name.removeprefix(prefix) for name in names)
                raise ValueError(
                    f"quantization_config leaves out some of {plain} of layer {layer}, which are"
                    " multiplied as one: leave out all of them or none"
                )
        if len({tuple(map(config.form, names)) for names in config.mlp_names(layer)}) > 1:
            raise ValueError(
                f"quantization_config.ignore names some of the experts of layer {layer}: name all or none"
            )
