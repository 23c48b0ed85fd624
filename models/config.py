"""The configuration of a decoder: its sizes, its options, and what it computes in place of the plain layers.

`RopeConfig`, `LatentConfig`, `RecurrentConfig` and `MixtureConfig` describe the rotary embedding, latent
attention, attention by a recurrent state and mixtures of experts; `DecoderConfig` joins them, and
`HeadConfig` describes a head that drafts from the hidden states of a target. Nothing here imports torch: the
host and the simulator read configurations, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, get_args

from devices.shapes import latent_row_bytes
from kv_cache.groups import ALL_TOKENS, ITEM_BYTES, DType, LayerCache, Lifetime, Plane
from models.packing import Int4, Packing
from models.quantization import BlockScales, Quantization, Stored

# Kinds that a checkpoint may name; those of kind "none" rotate nothing
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding; which fields count depends on `kind`, one of ROPE_KINDS or "none".

    `max_positions` is the reach that the checkpoint claims, `original_max_positions` the length that it was
    first trained on; `attention_factor` None means that yarn derives it.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Factor of each pair, if no request is longer than the original length
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # factor of each pair, if one may be
    width: int = 0  # width of a head, of which `dim` dimensions are rotated
    is_within: bool = False  # whether `max_positions` is the whole reach, however the embedding is stretched
    # Whether rotated pairs lie side by side in a checkpoint, and not halves apart
    interleaved: bool = False

    @property
    def num_fixed(self) -> int:
        """Number of dimensions of a head that are not rotated."""
        return max(0, self.width - self.dim)


def needs_long_factors(config: RopeConfig, longest_tokens: int) -> bool:
    """Whether requests may have more tokens than the short factors allow.

    The last token of a request is never computed.
    """
    return config.kind == "longrope" and longest_tokens - 1 > config.original_max_positions


QUERY_NORM = "q_a_layernorm"  # the norm of compressed queries, in a checkpoint
# Eps of the norms of compressed queries, of latents and of index keys, whatever the model's own is
NORM_EPS = 1e-6


INDEX_KEY_NORM = "indexer.k_norm"  # the norm of index keys, in a checkpoint; it has a bias


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The indexer of sparse latent attention, which chooses the tokens that a query reads.

    DeepSeek-V3.2-Exp has one in each layer; GLM-5 after it may share what one layer chose with the next ones.
    """

    num_heads: int
    head_dim: int  # width of a head's query and of the index key of a token
    top_k: int  # most tokens that a query reads
    # Whether pairs that are rotated lie side by side in a checkpoint, and not halves apart
    interleaved: bool = False

    def first(self) -> tuple[str, str]:
        """Return the linears that read the hidden state, which are multiplied as one."""
        return "indexer.wk", "indexer.weights_proj"

    def linears(self, hidden_size: int, query_rank: int) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear; every rank computes all of them."""
        yield "indexer.wq_b", query_rank, self.num_heads * self.head_dim
        yield "indexer.wk", hidden_size, self.head_dim
        yield "indexer.weights_proj", hidden_size, self.num_heads


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent."""

    query_rank: int | None  # width of compressed queries; None: queries come from the hidden state
    rank: int  # width of a latent
    nope_dim: int  # width of the part of a head's query that does not carry the position
    rope_dim: int  # width of the part that does
    value_dim: int  # width of a head's value
    scale: float  # scale of the scores
    index: IndexConfig | None = None  # the indexers of the layers that have one; None: all tokens are read

    @property
    def query_dim(self) -> int:
        """Width of a head's query, both parts together."""
        return self.nope_dim + self.rope_dim

    @property
    def token_width(self) -> int:
        """Numbers that the cache holds of a token in one layer: its latent and its rope key."""
        return self.rank + self.rope_dim

    def first(self) -> tuple[str, str]:
        """Return the linears that read the hidden state, which are multiplied as one."""
        return ("q_proj" if self.query_rank is None else "q_a_proj", "kv_a_proj_with_mqa")

    def linears(self, hidden_size: int, num_heads: int) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear of a layer's attention."""
        queries = num_heads * self.query_dim
        if self.query_rank is None:
            yield "q_proj", hidden_size, queries
        else:
            yield "q_a_proj", hidden_size, self.query_rank
            yield "q_b_proj", self.query_rank, queries
        yield "kv_a_proj_with_mqa", hidden_size, self.token_width
        yield "kv_b_proj", self.rank, num_heads * (self.nope_dim + self.value_dim)
        yield "o_proj", num_heads * self.value_dim, hidden_size

    @property
    def norm_width(self) -> int:
        """Number of weights of its norms."""
        return self.rank + (self.query_rank or 0)


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer with a recurrent state keeps of a request, however long it is, on one rank."""

    planes: tuple[Plane, ...]  # the shape of each is that of one request's numbers

    @property
    def num_bytes(self) -> int:
        """Bytes of one request in all planes."""
        return sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in self.planes)


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Attention by the gated delta rule (see attention/recurrent.py), which keeps one state of fixed size.

    Of kind "gated" (Gated DeltaNet, arXiv 2412.06464), the state of a head decays as a whole, and each key
    head serves equally many value heads. Of kind "kimi" (Kimi Delta Attention, 2510.26692), each channel of
    a key has a decay of its own, which comes from the hidden state by way of `key_dim` numbers, as the gate
    of the output does.
    """

    kind: Literal["gated", "kimi"]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # positions that the convolution before the rule sees
    # Whether a checkpoint has the projections of kind "gated" joined, key head by key head
    is_interleaved: bool = False
    state_dtype: DType = "float32"
    num_tail: int = 0  # drafts of a step whose inputs are kept beside the state, which they do not change

    @property
    def block(self) -> str:
        """The name of such attention in a checkpoint."""
        return "linear_attn" if self.kind == "gated" else "self_attn"

    @property
    def widths(self) -> tuple[int, int, int]:
        """Width of the queries, keys and values of all heads together."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of channels that the convolution mixes: those of queries, keys and values."""
        return sum(self.widths)

    def first(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the linears that read the hidden state, in two groups that are multiplied as one each."""
        if self.kind == "kimi":
            return ("q_proj", "k_proj", "v_proj"), ("b_proj", "f_a_proj", "g_a_proj")
        if self.is_interleaved:
            return ("in_proj_qkvz",), ("in_proj_ba",)
        return ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")

    @property
    def output(self) -> str:
        """The name of the linear behind the rule."""
        return "o_proj" if self.kind == "kimi" else "out_proj"

    def linears(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear of a layer's attention."""
        keys, _, values = self.widths
        heads = self.num_value_heads
        if self.kind == "kimi":
            sizes = {"q_proj": keys, "k_proj": keys, "v_proj": values, "b_proj": heads}
            sizes |= {"f_a_proj": self.key_dim, "g_a_proj": self.key_dim}
            yield "f_b_proj", self.key_dim, keys
            yield "g_b_proj", self.key_dim, values
        elif self.is_interleaved:
            sizes = {"in_proj_qkvz": self.num_channels + values, "in_proj_ba": 2 * heads}
        else:
            sizes = {"in_proj_qkv": self.num_channels, "in_proj_z": values}
            sizes |= {"in_proj_b": heads, "in_proj_a": heads}
        for name, outputs in sizes.items():
            yield name, hidden_size, outputs
        yield self.output, values, hidden_size

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the other tensors of a layer's attention, by their names in a checkpoint."""
        keys, _, values = self.widths
        heads = self.num_value_heads
        if self.kind == "kimi":
            convs = {"q_conv1d.weight": keys, "k_conv1d.weight": keys, "v_conv1d.weight": values}
            rates: dict[str, tuple[int, ...]] = {"A_log": (1, 1, heads, 1), "dt_bias": (keys,)}
            norm = "o_norm.weight"
        else:
            convs = {"conv1d.weight": self.num_channels}
            rates, norm = {"A_log": (heads,), "dt_bias": (heads,)}, "norm.weight"
        shapes = {name: (channels, 1, self.conv_width) for name, channels in convs.items()}
        return {**shapes, **rates, norm: (self.value_dim,)}

    @property
    def vector_size(self) -> int:
        """Number of all weights that are not of linears."""
        return sum(map(math.prod, self.vectors().values()))

    @property
    def num_wide(self) -> int:
        """Number of those that are kept in float32: all but the weights of the norm."""
        return self.vector_size - self.value_dim

    def state(self, dtype: DType) -> LayerState:
        """Return what a layer keeps of a request: the state of each head, and the convolution's inputs.

        With drafts, these are followed by what the rule reads of the last drafts, before the convolution.
        """
        state = self.num_value_heads, self.value_dim, self.key_dim
        inputs = self.conv_width - 1, self.num_channels
        kept = Plane("states", state, self.state_dtype), Plane("inputs", inputs, dtype)
        if not self.num_tail:
            return LayerState(kept)
        heads = self.num_tail, self.num_value_heads
        tail = (
            Plane("tail_inputs", (self.num_tail, self.num_channels), dtype),
            Plane("tail_decays", (*heads, self.key_dim) if self.kind == "kimi" else heads, "float32"),
            Plane("tail_betas", heads, dtype),
        )
        return LayerState((*kept, *tail))

    def head_runs(self, dtype: DType) -> tuple[tuple[int, int], ...]:
        """Return how the planes of `state`, one after the other, divide into key heads.

        Each entry is some runs, in each of which the key heads lie one after the other, with so many bytes
        each; the value heads that a key head serves are its own. They are the same on any number of ranks.
        """
        item, values = ITEM_BYTES[dtype], self.num_value_heads // self.num_key_heads
        channels = ((2, self.key_dim * item), (1, values * self.value_dim * item))  # queries and keys; values
        state = values * self.value_dim * self.key_dim * ITEM_BYTES[self.state_dtype]
        kept = ((1, state), *(self.conv_width - 1) * channels)
        if not self.num_tail:
            return kept
        decays = values * (self.key_dim if self.kind == "kimi" else 1) * ITEM_BYTES["float32"]
        return (*kept, *self.num_tail * channels, (self.num_tail, decays), (self.num_tail, values * item))


MLP_ROLES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The mixtures of experts of a decoder.

    A router's `scores` of the experts are their probabilities ("softmax"), or an independent number from 0 to
    1 for each ("sigmoid"). Of `num_groups` equal groups of experts, a token chooses within the
    `num_chosen_groups` groups whose `group_best` best experts have the highest sum. If it `is_corrected`, a
    bias is added to the scores for the choice alone. The weights are the scores of the chosen experts, which
    are divided by their sum if it `normalizes`, times `scale`.

    The experts of a layer lie in places, in the order of `placement`; with several ranks, a rank may have
    only those in the places that are `held`.
    """

    num_experts: int
    num_chosen: int  # experts that each token chooses
    inner_size: int  # inner size of each expert
    normalizes: bool
    block: str = "mlp"  # name of a layer's mixture in a checkpoint
    roles: tuple[str, str, str] = MLP_ROLES  # names of an expert's gate, up and down
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    is_corrected: bool = False
    router: str = "gate"  # name of the router in a checkpoint
    correction: str = "gate.e_score_correction_bias"  # name of the choice's correction there
    is_correction_row: bool = False  # whether a checkpoint has the correction as [1, experts]
    is_biased: bool = False  # whether the router has a bias
    is_stacked: bool = False  # whether a checkpoint has all experts of a layer in one tensor
    may_be_stacked: bool = False  # whether it may have, gate before up, and as outputs by inputs
    scale: float = 1.0
    shared_size: int = 0  # inner size of an expert that computes every token; 0: there is none
    shared_block: str = "shared_experts"  # name of the shared expert in a checkpoint
    has_shared_gate: bool = False  # whether a gate from 0 to 1 weighs the shared expert's result
    placement: tuple[
        tuple[int, ...], ...
    ] = ()  # the experts of each layer by place; empty: in the order of their numbers
    held: range | None = None  # places of the experts on this rank; None: all

    def places(self, layer: int) -> Sequence[int]:
        """Return the experts of a layer in the order of their places."""
        return self.placement[layer] if self.placement else range(self.num_experts)

    def held_in(self, layer: int) -> Sequence[int]:
        """Return the experts of a layer on this rank: all by number, or some by place."""
        if self.held is None:
            return range(self.num_experts)
        places = self.places(layer)
        return [places[each] for each in self.held]

    @property
    def num_held(self) -> int:
        """Number of experts of a layer on this rank."""
        return self.num_experts if self.held is None else len(self.held)

    @property
    def is_plain(self) -> bool:
        """Whether the experts with the highest probabilities are chosen, with these as weights."""
        return self.scores == "softmax" and self.num_groups == 1 and not self.is_corrected


Mixer = Literal["attention", "latent", "recurrent"]
# Whether a layer with sparse attention chooses by an indexer of its own, or shares the last choice before it
Choosing = Literal["own", "shared"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer computes: what mixes its tokens, and the MLP that follows.

    All layers of one kind have the same sizes, which stand once in `DecoderConfig`. What the layer remembers
    follows from both: of each token (`DecoderConfig.layer_cache`) or, with a recurrent state, of each request
    (`DecoderConfig.layer_state`).
    """

    mixer: Mixer = "attention"
    window: int | None = None  # positions that a query sees, its own included; None: all
    mlp: Literal["dense", "experts"] = "dense"
    index: Choosing | None = None  # None: all tokens are read


def layer_specs(
    windows: Sequence[int | None],
    has_experts: bool | Sequence[bool] = False,
    mixer: Mixer = "attention",
) -> tuple[LayerSpec, ...]:
    """Return a layer for each window; `has_experts` says which of them have experts, or that all have."""
    each_has = [has_experts] * len(windows) if isinstance(has_experts, bool) else has_experts
    return tuple(
        LayerSpec(mixer, window, "experts" if has else "dense") for window, has in zip(windows, each_has)
    )


Gate = Literal["silu", "gelu_tanh", "clamped"]
# How queries and keys are normed: head by head before they are rotated, or after, or all heads of a token
# together before
QkNorm = Literal["none", "heads", "rotated", "joined"]
Form = Stored | Int4  # how a linear is stored
INT8: frozenset[Form] = frozenset(get_args(Stored)) - {"plain"}

DTYPE_BYTES: dict[DType, int] = {each: ITEM_BYTES[each] for each in get_args(DType)}
# Size of a float32 scale: one for each int8 output channel, and for each head in an int8 cache
SCALE_BYTES = 4
W4A8_SCALE_BYTES = 12  # An NPU's scale of an output in 4 bits, and what splitting it adds
STATIC_BIAS_BYTES = 4  # the int32 that is added to each output of a linear whose inputs have one scale

ROUTER_BYTES = 4  # size of a router's weight, which is kept in float32
FUSED = ("q_proj", "k_proj", "v_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")  # norms before attention and before the MLP
LAST_NORM = "model.norm"
QKV, GATE_UP = "qkv_proj", "gate_up_proj"  # names of linears that a checkpoint stores as one
UP = ".kv_b_proj"  # a linear of latent attention, held in the model's type however it is stored


# It has no slots, so that what is asked for in each simulated step can be kept
@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: RMS norms before attention and MLP, rotary embedding, SwiGLU, some of it by experts.

    `layers` says what each layer computes. `mixture` has the sizes of those with experts, `recurrent` of
    those with a state, and `latent` of those with latent attention; `num_kv_heads` is 1 then, and `head_dim`
    the latent's width, as the cache holds it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool  # q, k and v have a bias
    output_bias: bool  # the output projection of attention has a bias
    mlp_bias: bool
    qk_norm: QkNorm
    dtype: DType
    max_positions: int
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    int8_cache: bool = False  # keys and values are int8
    # A page in int8 has a float32 scale for each token and head; otherwise each channel has one, of the
    # checkpoint, for all pages
    scales_in_pages: bool = True
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None
    # Form of stored weights that are converted to the model's type when they are read
    stored_form: BlockScales | Packing | None = None
    kept_form: Packing | None = None  # form of linears that stay in 4 bits
    stored_joined: tuple[str, ...] = ()  # QKV, GATE_UP: linears that the checkpoint stores as one
    # Names of a layer's norms in a checkpoint; a third and a fourth are applied to the outputs of attention
    # and MLP. Without a name there is no such norm
    norms: tuple[str, ...] = NORMS
    norms_add_one: bool = False  # 1 is added to the norm weights of the checkpoint
    gate: Gate = "silu"  # activation of the MLP's gate
    gate_slope: float = 1.702  # slope of the sigmoid of a clamped gate
    gate_limit: float = 7.0  # limit to which a clamped gate, and what it multiplies, are clipped
    embedding_scale: float = 1.0
    score_cap: float | None = None  # attention scores are cap * tanh(score / cap)
    logit_cap: float | None = None  # the same for logits
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")  # names of these norms in a checkpoint
    # Queries are multiplied by 1 + a * ln(1 + position // b), of these a and b; None: they are not
    query_growth: tuple[float, int] | None = None
    has_sinks: bool = False  # each query head has an attention score that belongs to no key
    # What attention returns is weighed by gates from 0 to 1, which its query projection has beside each head
    has_output_gate: bool = False
    own_scale: float | None = None  # scale of attention scores; None: head_dim**-0.5
    first_layer: int = 0  # number in the checkpoint of the first of `layers`; later stages begin with another
    window_rope: RopeConfig | None = None  # rotary embedding of layers with a window, if it differs
    # Layers that a checkpoint may have to predict further tokens; they are not read here. They are numbered
    # behind the model's own, unless they lie beside these under a name
    num_unread_layers: int = 0
    unread_block: str = ""
    reads_text_alone: bool = False  # whether a checkpoint has towers for images, too, which are not read
    # Windows whose layers keep only the pages that a query can see, in a group of pages for each; layers with
    # other windows keep all pages, as those without a window do (see kv_cache/groups.py)
    window_groups: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layers_behind(self) -> range:
        """The numbers of layers that are not read, if they are numbered behind the model's own."""
        count = 0 if self.unread_block else self.num_unread_layers
        return range(self.num_layers, self.num_layers + count)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(each.window for each in self.layers)

    def group_of(self, layer: int) -> int:
        """Return the group of a layer's pages: 0, or one more than the place of its window."""
        window = self.layers[layer].window
        return 1 + self.window_groups.index(window) if window in self.window_groups else 0

    @cached_property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The window of each layer that reads keys and values of its request, in place of a state."""
        return tuple(each.window for each in self.layers if each.mixer != "recurrent")

    @property
    def reaches(self) -> tuple[int | None, ...]:
        """The most positions that a query of each such layer reads, by a window or by choice; None: all."""
        top = self.latent.index.top_k if self.latent and self.latent.index else None
        layers = (each for each in self.layers if each.mixer != "recurrent")
        return tuple(each.window if each.index is None else top for each in layers)

    @cached_property
    def num_indexers(self) -> int:
        """Number of layers that choose by an indexer of their own."""
        return sum(each.index == "own" for each in self.layers)

    def recurrent_of(self, layer: int) -> RecurrentConfig | None:
        """The sizes of a layer's recurrent state; None if it has none."""
        return self.recurrent if self.layers[layer].mixer == "recurrent" else None

    def index_of(self, layer: int) -> IndexConfig | None:
        """The sizes of a layer's own indexer; None if it has none."""
        return self.latent.index if self.latent and self.layers[layer].index == "own" else None

    def layer_state(self, layer: int) -> LayerState | None:
        """Return what a layer keeps of each request; None for one that keeps something of each token."""
        recurrent = self.recurrent_of(layer)
        return None if recurrent is None else recurrent.state(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes that all layers with a recurrent state keep of a request."""
        states = map(self.layer_state, range(self.num_layers))
        return sum(each.num_bytes for each in states if each is not None)

    def layer_cache(self, layer: int) -> LayerCache:
        """Return what a layer keeps of each token, and for how long; nothing if it has a recurrent state."""
        group = self.group_of(layer)
        lifetime = Lifetime("window", self.window_groups[group - 1]) if group else ALL_TOKENS
        if self.recurrent_of(layer) is not None:
            return LayerCache(lifetime, ())
        if self.int8_cache and self.layers[layer].index is not None:
            return LayerCache(lifetime, self._int8_sparse_planes(layer))
        if self.layers[layer].mixer == "latent":
            assert self.latent is not None, "latent attention has sizes"
            widths = {"latents": self.latent.rank, "rope_keys": self.latent.rope_dim}
            if (index := self.index_of(layer)) is not None:
                widths["index_keys"] = index.head_dim
        else:
            widths = {"keys": self.head_dim, "values": self.head_dim}
        stored = "int8" if self.int8_cache else self.dtype
        scale_bytes = SCALE_BYTES if self.int8_cache and self.scales_in_pages else 0
        heads = self.num_kv_heads
        planes = [Plane(name, (heads, width), stored, heads * scale_bytes) for name, width in widths.items()]
        return LayerCache(lifetime, tuple(planes))

    def _int8_sparse_planes(self, layer: int) -> tuple[Plane, ...]:
        """Return what a layer with sparse attention keeps in int8 (see attention/int8_sparse.py)."""
        assert self.latent is not None, "latent attention has sizes"
        rank, index = self.latent.rank, self.index_of(layer)
        beside = latent_row_bytes(rank, self.latent.rope_dim) - rank  # rope key and scales
        rows = Plane("latents", (1, rank), "int8", beside)
        if index is None:
            return (rows,)
        keys = Plane("index_keys", (1, index.head_dim), "int8")
        return rows, keys, Plane("index_scales", (1, 1), "float16")

    def form(self, name: str) -> Form:
        """Return how the linear with this checkpoint name is stored.

        A tied head is stored as the embedding is.
        """
        quantization = self.quantization
        is_tied = name == "lm_head" and self.tie_embeddings
        if self.kept_form is not None and self.kept_form.covers(self._stored_name(name)):
            return Int4(self.kept_form.group_size, self.kept_form.has_zeros)
        return "plain" if quantization is None or is_tied else quantization.form(name)

    def _stored_name(self, name: str) -> str:
        """Return the name under which the checkpoint stores this linear, perhaps joined with others."""
        block, _, role = name.rpartition(".")
        for joined, roles in ((QKV, FUSED), (GATE_UP, MLP_ROLES[:2])):
            if joined in self.stored_joined and role in roles:
                return f"{block}.{joined}"
        return name

    @property
    def int8_forms(self) -> frozenset[Stored]:
        """The forms of linears in int8; of "w8a16" the weights alone are."""
        return frozenset() if self.quantization is None else self.quantization.int8_forms

    @property
    def is_int8(self) -> bool:
        """Whether any linear is multiplied in int8."""
        return not self.int8_forms <= {"w8a16"}

    @property
    def largest_int8_side(self) -> int:
        """The longest side of a product of linears in int8, 0 without any; gate and up are one product."""
        layers = range(self.num_layers)
        gates = {names[0] for layer in layers for names in self.mlp_names(layer)}
        gates |= {names[0] for layer in layers if (names := self.shared_names(layer))}
        sides = [
            max(inputs, 2 * outputs if name in gates else outputs)
            for name, inputs, outputs in self.linears()
            if self.form(name) in INT8
        ]
        return max(sides, default=0)

    def has_norm_bias(self, name: str) -> bool:
        """Whether a bias is added to what the norm of this checkpoint name computes."""
        return self.quantization is not None and self.quantization.has_norm_bias(name)

    def has_cache_scales(self, name: str) -> bool:
        """Whether the checkpoint has scales of keys and values for the attention of this name.

        Each channel has one, where an int8 cache has one for each token and head otherwise.
        """
        return self.int8_cache and self.quantization is not None and self.quantization.has_cache_scales(name)

    @property
    def without_cache_scales(self) -> list[str]:
        """The names of attention for which `has_cache_scales` is false, in the order of the layers."""
        names = (f"{self.layer_prefix(layer)}self_attn" for layer in range(self.num_layers))
        return [name for name in names if not self.has_cache_scales(name)]

    def layer_prefix(self, layer: int) -> str:
        """Return how the checkpoint's names of a layer begin; `layer` counts from the first held here."""
        return f"model.layers.{self.first_layer + layer}."

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear."""
        hidden = self.hidden_size
        for layer in range(self.num_layers):
            prefix = self.layer_prefix(layer)
            block = self.mixer_name(layer)
            for name, inputs, outputs in self.mixer_linears(layer):
                yield f"{prefix}{block}.{name}", inputs, outputs
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

    def mixer_name(self, layer: int) -> str:
        """Return the name in a checkpoint of what mixes a layer's tokens."""
        recurrent = self.recurrent_of(layer)
        return "self_attn" if recurrent is None else recurrent.block

    def mixer_linears(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of every linear of what mixes a layer's tokens."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        if (recurrent := self.recurrent_of(layer)) is not None:
            yield from recurrent.linears(hidden)
            return
        if self.layers[layer].mixer == "latent":
            assert self.latent is not None, "latent attention has sizes"
            yield from self.latent.linears(hidden, self.num_heads)
            if (index := self.index_of(layer)) is not None:
                assert self.latent.query_rank is not None, "an indexer reads compressed queries"
                yield from index.linears(hidden, self.latent.query_rank)
            return
        yield "q_proj", hidden, self.num_heads * self.query_dim
        yield "k_proj", hidden, self.num_kv_heads * self.head_dim
        yield "v_proj", hidden, self.num_kv_heads * self.head_dim
        yield "o_proj", heads, hidden

    def first_linears(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """Return the linears that read a layer's hidden state, in groups that are multiplied as one."""
        if (recurrent := self.recurrent_of(layer)) is not None:
            return recurrent.first()
        if self.latent is None:
            return (FUSED,)
        index = self.index_of(layer)
        return (self.latent.first(), *([] if index is None else [index.first()]))

    @property
    def query_dim(self) -> int:
        """Width of a query head, and of its gate, as its linear computes them."""
        own = self.head_dim * (2 if self.has_output_gate else 1)
        return own if self.latent is None else self.latent.query_dim

    @property
    def value_dim(self) -> int:
        """Width of a head as the output projection takes it."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Number of weights of the norms of queries and keys; 0 if there are none."""
        if self.qk_norm == "none":
            return 0, 0
        is_joined = self.qk_norm == "joined"
        heads = (self.num_heads, self.num_kv_heads) if is_joined else (1, 1)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    @property
    def scale(self) -> float:
        """Scale of attention scores."""
        own = self.head_dim**-0.5 if self.own_scale is None else self.own_scale
        return own if self.latent is None else self.latent.scale

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """The mixture of experts of a layer; None if it has a dense MLP."""
        return self.mixture if self.layers[layer].mlp == "experts" else None

    def inner_size(self, layer: int) -> int:
        """Inner size of the MLP of a layer, or of each of its experts."""
        mixture = self.mixture_of(layer)
        return self.intermediate_size if mixture is None else mixture.inner_size

    def mlp_names(self, layer: int, name: str = "") -> list[tuple[str, str, str]]:
        """Return the checkpoint names of gate, up and down of a layer's MLP, or of its experts on this rank.

        `name` is the layer's prefix, if it is not counted from the first layer of the checkpoint.
        """
        prefix, mixture = name or self.layer_prefix(layer), self.mixture_of(layer)
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
        prefix = name or self.layer_prefix(layer)
        return _joined(f"{prefix}{mixture.block}.{mixture.shared_block}.", MLP_ROLES)

    @property
    def num_recurrent(self) -> int:
        """Number of layers that have a recurrent state."""
        return sum(each.mixer == "recurrent" for each in self.layers)

    @property
    def num_mixtures(self) -> int:
        """Number of layers that have a mixture of experts."""
        return sum(each.mlp == "experts" for each in self.layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def kv_bytes_by_group(self, num_devices: int = 1) -> tuple[int, ...]:
        """Return the bytes that each group of layers keeps of a token, on each device that shares the layers.

        With more devices than key-value heads, several devices hold the same head.
        """
        part = replace(self, num_kv_heads=-(-self.num_kv_heads // num_devices))
        sums = [0] * (1 + len(self.window_groups))
        for layer in range(self.num_layers):
            sums[self.group_of(layer)] += part.layer_cache(layer).token_bytes
        return tuple(sums)

    def kv_bytes_per_token(self, num_devices: int = 1) -> int:
        """Return the bytes of a token's keys and values over all layers, as `kv_bytes_by_group` does."""
        return sum(self.kv_bytes_by_group(num_devices))

    @cached_property
    def kv_head_bytes(self) -> int:
        """Bytes that a layer keeps of one key-value head of a token."""
        return max((each.token_bytes for each in self._of_one_head()), default=0)

    @cached_property
    def attended_head_bytes(self) -> int:
        """Bytes that attention reads of one key-value head of a token in a layer, index keys left out."""
        return max((one.token_bytes - self._index_key_bytes(one) for one in self._of_one_head()), default=0)

    @cached_property
    def index_key_bytes(self) -> int:
        """Bytes of a token's index key in a layer with an indexer; 0 if there is none."""
        return max(map(self._index_key_bytes, self._of_one_head()), default=0)

    def _of_one_head(self) -> list[LayerCache]:
        """Return what each layer keeps of each token, of one key-value head."""
        one = replace(self, num_kv_heads=1)
        return [one.layer_cache(layer) for layer in range(self.num_layers)]

    @staticmethod
    def _index_key_bytes(cache: LayerCache) -> int:
        return sum(each.token_bytes for each in cache.planes if each.name.startswith("index_"))

    @property
    def growing_kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that a step reads for each token of context, however long the context is.

        Layers with a window are left out, because they read a bounded number of tokens. So do layers with
        sparse attention; of these only the index keys are counted, all of which their indexers read.
        """
        total = 0
        for layer, spec in enumerate(self.layers):
            if spec.window is None:
                cache = self.layer_cache(layer)
                total += cache.token_bytes if spec.index is None else self._index_key_bytes(cache)
        return total

    @property
    def step_weight_bytes(self) -> int:
        """The least bytes of weights that a step reads.

        Only few rows are read of an embedding that is not the head, and of each mixture only the experts that
        one token chooses.
        """
        embedding = 0 if self.tie_embeddings else self.embedding_bytes
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
        if form == "w4a8":
            return inputs // 2 + W4A8_SCALE_BYTES
        if form == "static":
            return inputs + SCALE_BYTES + STATIC_BIAS_BYTES
        return inputs * self.dtype_bytes if form == "plain" else inputs + SCALE_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the device holds them, including scales."""
        total = self.num_parameters * self.dtype_bytes
        total += self._router_parameters * (ROUTER_BYTES - self.dtype_bytes)
        for name, inputs, outputs in self.linears():
            if not name.endswith(UP):
                total += outputs * (self._row_bytes(self.form(name), inputs) - inputs * self.dtype_bytes)
        if self.recurrent is not None:
            wide = self.num_recurrent * self.recurrent.num_wide
            total += wide * (DTYPE_BYTES["float32"] - self.dtype_bytes)
        scaled = self.num_layers - len(self.without_cache_scales)
        return total + scaled * 2 * self.num_kv_heads * self.head_dim * SCALE_BYTES

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding."""
        return self.vocab_size * self.hidden_size * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, including scales; 0 where it is the embedding."""
        rows = 0 if self.tie_embeddings else self.vocab_size
        return rows * self._row_bytes(self.form("lm_head"), self.hidden_size)

    @property
    def reach(self) -> int:
        """The positions that the model reaches, with a rotary embedding that its configuration stretches."""
        rope = self.rope
        if rope.is_within:
            return self.max_positions
        if rope.kind == "yarn":
            return max(self.max_positions, int(rope.original_max_positions * rope.factor))
        if rope.kind in ("linear", "dynamic"):
            return int(self.max_positions * rope.factor)
        return self.max_positions

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
        query_dim, kv_dim = self.num_heads * self.query_dim, self.num_kv_heads * self.head_dim
        mixers = sum(
            inputs * outputs
            for layer in range(self.num_layers)
            for _, inputs, outputs in self.mixer_linears(layer)
        )
        attention = 0 if self.latent is None else self.latent.norm_width
        attention += self.attention_bias * (query_dim + 2 * kv_dim) + self.output_bias * self.hidden_size
        attention += sum(self.qk_norm_widths) + self.has_sinks * self.num_heads
        mixers += (self.num_layers - self.num_recurrent) * attention
        indexes = map(self.index_of, range(self.num_layers))
        mixers += sum(2 * index.head_dim for index in indexes if index is not None)  # norms of index keys
        mixers += 0 if self.recurrent is None else self.num_recurrent * self.recurrent.vector_size
        layer = sum(map(bool, self.norms)) * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        mlps = (self.num_layers - self.num_mixtures) * mlp + self._router_parameters
        if self.mixture is not None:
            of_each = self.mixture.num_held * self._expert_parameters
            of_each += (3 * self.shared_size + self.mixture.has_shared_gate) * self.hidden_size
            mlps += self.num_mixtures * of_each
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        names = [
            f"{self.layer_prefix(layer)}{name}"
            for layer in range(self.num_layers)
            for name in self.norms
            if name
        ]
        biases = sum(self.has_norm_bias(name) for name in (*names, LAST_NORM)) * self.hidden_size
        if self.latent is not None and self.latent.query_rank is not None:
            names = [f"{self.layer_prefix(layer)}self_attn.{QUERY_NORM}" for layer in range(self.num_layers)]
            biases += sum(map(self.has_norm_bias, names)) * self.latent.query_rank
        return embeddings + mixers + self.num_layers * layer + mlps + self.hidden_size + biases

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


def bytes_of_adapters(config: DecoderConfig, most: int, rank: int) -> int:
    """Return the bytes of the adapters' places of a decoder, or of a rank's part of one."""
    numbers = 0
    for layer in range(config.num_layers):
        sizes = [(inputs, outputs) for _, inputs, outputs in config.mixer_linears(layer)]
        if config.mixture_of(layer) is None:
            hidden, inner = config.hidden_size, config.intermediate_size
            sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        numbers += sum(inputs + outputs for inputs, outputs in sizes)
    return most * rank * numbers * config.dtype_bytes


def check_fused(config: DecoderConfig) -> None:
    """Raise ValueError if only some of the linears that are multiplied as one are quantised."""
    if config.quantization is None and config.kept_form is None:
        return
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shared, block = config.shared_names(layer), config.mixer_name(layer)
        joined = [
            *(tuple(f"{prefix}{block}.{name}" for name in names) for names in config.first_linears(layer)),
            *(each[:2] for each in [*config.mlp_names(layer), *([shared] if shared else [])]),
        ]
        form = cache(config.form)  # An expert's linears are asked for twice.
        for names in joined:
            if len(set(map(form, names))) > 1:
                plain = ", ".join(name.removeprefix(prefix) for name in names)
                raise ValueError(
                    f"quantization_config leaves out some of {plain} of layer {layer}, which are"
                    " multiplied as one: leave out all of them or none"
                )
        if len({tuple(map(form, names)) for names in config.mlp_names(layer)}) > 1:
            raise ValueError(
                f"quantization_config.ignore names some of the experts of layer {layer}: name all or none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DecoderConfig):
    """The layers of a head. `vocab_size` is the target's; a page keeps `num_kept` features.

    `taps` are the layers of the target whose inputs it reads, in rising order; a number one past the last
    layer stands for its output.
    """

    taps: tuple[int, ...]
    num_kept: int

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features that one page holds."""
        return self.num_kept * self.hidden_size * self.dtype_bytes
