"""Read a decoder's configuration from the config.json of a Hugging Face checkpoint.

The keys and their defaults are those of transformers' configuration classes; a value that the decoder cannot
honour is refused by its key. Beside the plain decoder the keys describe experts, attention by latents, and
which positions a layer attends to: all earlier ones, or the last of them, its window. Families differ in the
keys that say so; what no family computes here, such as attention to later positions, is refused in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from borders.numbers import Number, Range, integers, numbers
from borders.refusal import abbreviate
from kv_cache.groups import DType
from models.config import (
    DTYPE_BYTES,
    NORMS,
    ROPE_KINDS,
    DecoderConfig,
    IndexConfig,
    LatentConfig,
    LayerSpec,
    Mixer,
    MixtureConfig,
    QkNorm,
    RecurrentConfig,
    RopeConfig,
    layer_specs,
)
from models.packing import packing
from models.quantization import block_scales, quantization

Windows = tuple[int | None, ...]

UNQUANTISED = "linears that are stored joined are read unquantised or packed: use the original checkpoint"
STACKED = "mxfp4 is of experts in one tensor (gpt_oss), which no other form is read of"

# Far above every published model, and low enough that values derived from them can be computed and planned
MOST = {
    "num_hidden_layers": 2**12,
    "max_window_layers": 2**31,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**24,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
    "kv_lora_rank": 2**14,
    "q_lora_rank": 2**24,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "index_n_heads": 2**14,
    "index_head_dim": 2**14,
    "index_topk": 2**24,
    "index_topk_freq": 2**12,
    "index_skip_topk_offset": 2**12,
    "linear_num_key_heads": 2**14,
    "linear_num_value_heads": 2**14,
    "linear_key_head_dim": 2**14,
    "linear_value_head_dim": 2**14,
    "linear_num_heads": 2**14,
    "linear_head_dim": 2**14,
    "linear_conv_kernel_dim": 2**10,
    "full_attention_interval": 2**12,
    "n_routed_experts": 2**10,
    "n_shared_experts": 2**10,
    "n_group": 2**10,
    "topk_group": 2**10,
    "first_k_dense_replace": 2**12,
    "num_nextn_predict_layers": 2**6,
    "mtp_num_hidden_layers": 2**6,
    "num_experts": 2**10,
    "num_experts_per_tok": 2**10,
    "num_shared_experts": 2**10,
    "moe_num_experts": 2**10,
    "moe_k": 2**10,
    "moe_topk": 2**10,
    "rotary_dim": 2**14,
    "moe_num_shared_experts": 2**10,
    "moe_layer_start_index": 2**12,
    "moe_layer_end_index": 2**12,
    "moe_layer_interval": 2**12,
    "decoder_sparse_step": 2**12,
    "sliding_window": 2**31,
    "sliding_window_pattern": 2**12,
    "query_pre_attn_scalar": 2**24,
    "max_position_embeddings": 2**31,
    "original_max_position_embeddings": 2**31,
    "rms_norm_eps": 1.0,
    "rope_theta": 1e18,
    "rope_local_base_freq": 1e18,
}
MOST_NUMBER = 2.0**24  # limit of the other numbers, which are factors


def decoder_config(
    hf: Mapping[str, Any],
    family: str,
    *,
    layers: tuple[LayerSpec, ...],
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm = "none",
    mixture: MixtureConfig | None = None,
    latent: LatentConfig | None = None,
    turned: float | None = None,
    interleaved: bool = False,
    norms: tuple[str, ...] = NORMS,
    stored_joined: tuple[str, ...] = (),
) -> DecoderConfig:
    """Return the decoder of `hf`, a parsed config.json; the keywords are where families differ.

    `turned` is the default share of a head that is rotated, in families that rotate a part of it.
    """
    packed = packing(hf)
    _check_joined(hf, bool(stored_joined) and packed is None, mixture is not None and mixture.is_stacked)
    if hf.get("hidden_act", "silu") != "silu":
        raise refused("hidden_act", hf["hidden_act"], "it must be silu")
    num_heads, num_kv_heads, head_dim = _heads(hf, latent)
    max_positions = integer(hf, "max_position_embeddings")
    return DecoderConfig(
        family=family,
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=integer(hf, "hidden_size"),
        layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=integer(hf, "intermediate_size"),
        rms_eps=number(hf, "rms_norm_eps", 1e-6),
        rope=replace(
            rope_config(hf, head_dim if latent is None else latent.rope_dim, max_positions, turned),
            interleaved=interleaved,
        ),
        tie_embeddings=boolean(hf, "tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_dtype(hf),
        max_positions=max_positions,
        eos_token_ids=_token_ids(hf, "eos_token_id"),
        quantization=quantization(hf),
        mixture=mixture,
        latent=latent,
        stored_form=packed or block_scales(hf),
        stored_joined=stored_joined,
        norms=norms,
        num_unread_layers=integer(hf, "num_nextn_predict_layers", 0, least=0),
    )


def _check_joined(hf: Mapping[str, Any], is_joined: bool, is_stacked: bool) -> None:
    """Raise ValueError if a checkpoint's joined linears or experts are quantised in an unread form."""
    said = hf.get("quantization_config")
    if isinstance(said, Mapping) and said:
        method = said.get("quant_method")
        if is_stacked != (method == "mxfp4"):
            raise refused("quantization_config.quant_method", method, STACKED)
        if is_joined:
            raise refused("quantization_config.quant_method", method, UNQUANTISED)


def _heads(hf: Mapping[str, Any], latent: LatentConfig | None) -> tuple[int, int, int]:
    """Return the query heads, key-value heads and the width of each, as the cache has them."""
    hidden_size = integer(hf, "hidden_size")
    num_heads = integer(hf, "num_attention_heads")
    if latent is not None:
        return num_heads, 1, latent.rank
    num_kv_heads = integer(hf, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise refused(
            "num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})"
        )
    if hf.get("head_dim") is None and hidden_size % num_heads:
        raise refused(
            "hidden_size", hidden_size, f"give head_dim, or a multiple of num_attention_heads ({num_heads})"
        )
    head_dim = integer(hf, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise refused("head_dim", head_dim, "the rotary embedding turns pairs: it must be even")
    return num_heads, num_kv_heads, head_dim


def rope_config(
    hf: Mapping[str, Any], head_dim: int, max_positions: int, turned: float | None = None
) -> RopeConfig:
    """Return the rotary embedding of `rope_scaling` beside `rope_theta`, or else of `rope_parameters`."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    if not isinstance(rope, Mapping):
        raise refused(key, rope, "it must be a mapping")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise refused(key, rope, "one rotary embedding for all layer types is supported, not one for each")
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the name in older files
    if kind not in ROPE_KINDS:
        raise refused(f"{key}.rope_type", kind, f"supported are {', '.join(ROPE_KINDS)}")
    dim = _turned_dim(hf, rope, head_dim, turned)

    original = max_positions
    if kind in ("llama3", "yarn", "longrope"):
        place = hf if hf.get("original_max_position_embeddings") is not None else rope
        original = integer(place, "original_max_position_embeddings", max_positions)
    factor = 1.0
    if kind in ("yarn", "longrope"):  # DeepSeek's factor is null, and Phi has none
        factor = number(rope, "factor", max_positions / original)
    elif kind != "default":
        factor = number(rope, "factor")
    if factor < 1:
        raise refused(f"{key}.factor", factor, "it must be at least 1")
    if kind == "dynamic" and dim <= 2:
        raise refused("head_dim", head_dim, "dynamic rope needs more than 2")
    theta = number(rope, "rope_theta", number(hf, "rope_theta", 10000.0))
    if theta <= 1:
        raise refused("rope_theta", theta, "it must be more than 1")
    low, high = 1.0, 4.0
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        if not 0 < low < high:
            raise refused(f"{key}.low_freq_factor", low, f"it must be from 0 to high_freq_factor ({high:g})")
    return RopeConfig(
        kind=kind,
        theta=theta,
        dim=dim,
        width=head_dim,
        factor=factor,
        original_max_positions=original,
        max_positions=max_positions,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=number(rope, "attention_factor") if "attention_factor" in rope else None,
        mscale=number(rope, "mscale", 0.0) or None,
        mscale_all_dim=number(rope, "mscale_all_dim", 0.0) or None,
        truncate=boolean(rope, "truncate", True),
        short_factors=_factors(rope, "short_factor", dim) if kind == "longrope" else (),
        long_factors=_factors(rope, "long_factor", dim) if kind == "longrope" else (),
    )


def _factors(rope: Mapping[str, Any], key: str, dim: int) -> tuple[float, ...]:
    """Return a factor for each pair of dimensions."""
    values: Any = rope.get(key)
    is_right = isinstance(values, list) and len(values) == dim // 2
    factors = Range(float, 0.0, MOST_NUMBER, is_open=True)
    if not is_right or not all(factors.read(each) for each in values):
        raise refused(
            f"rope_parameters.{key}", values, f"it must be {dim // 2} numbers above 0, one of each pair"
        )
    return tuple(map(float, values))


def _turned_dim(hf: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int, turned: float | None) -> int:
    """Return how many dimensions of a head are rotated."""
    place = rope if rope.get("partial_rotary_factor") is not None else hf
    share = number(place, "partial_rotary_factor", turned or 1.0)
    dim = int(head_dim * share)
    if turned is None and share != 1:
        raise refused("partial_rotary_factor", share, "whole heads are turned: it must be 1")
    if not 0 < share <= 1 or dim < 2 or dim % 2:
        raise refused("partial_rotary_factor", share, f"an even part of {head_dim} dimensions is turned")
    return dim


def ropes_by_layer_type(
    hf: Mapping[str, Any], *, theta: float, local_theta: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary embeddings of layers that see all positions and of those with a window.

    Both are given in the form of `rope_parameters`; older files give each a base of its own, and
    `rope_scaling` for the first alone.
    """
    said, scaling = (hf.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(said, Mapping) or set(said) - set(kinds):
        raise refused("rope_parameters", said, f"it must be a mapping of {' and '.join(kinds)}")
    parts = {**{f"rope_parameters.{kind}": said.get(kind) or {} for kind in kinds}, "rope_scaling": scaling}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise refused(key, part, "it must be a mapping")
        kind = part.get("rope_type", part.get("type"))
        if kind in ("dynamic", "longrope", "su"):
            raise refused(f"{key}.rope_type", kind, "of layers that differ, no angles depend on lengths")
        if part.get("truncate") not in (None, True):
            fix = "transformers ignores it where layers differ: it must be true"
            raise refused(f"{key}.truncate", part["truncate"], fix)
    if scaling.get("rope_type") is None and scaling.get("type", "default") != "default":
        fix = "transformers reads rope_type where layers differ, and ignores type: call it rope_type"
        raise refused("rope_scaling.type", scaling["type"], fix)
    full, local, scaled = parts.values()
    return (
        {"rope_theta": number(hf, "rope_theta", theta), **full, **scaled},
        {"rope_theta": number(hf, "rope_local_base_freq", local_theta), **local},
    )


def integer(hf: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Return `hf[key]`, an integer from `least` to MOST; the default replaces a missing or null key."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise _missing(key)
    return _read(key, value, integers(least, int(MOST[key])))


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return `hf[key]`, a number from 0 to MOST; the default replaces a missing or null key."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise _missing(key)
    return _read(key, value, numbers(0, MOST.get(key, MOST_NUMBER)))


def _read(key: str, value: object, allowed: Range[Number]) -> Number:
    if (found := allowed.read(value)) is None:
        raise refused(key, value, f"it must be {allowed}")
    return found


def boolean(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return `hf[key]`, true or false; the default replaces a missing or null key."""
    value = hf.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refused(key, value, "it must be true or false")
    return value


def _dtype(hf: Mapping[str, Any]) -> DType:
    """Return the type of the weights: dtype, or torch_dtype in older files, or float32."""
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    value = hf.get(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    for dtype in DTYPE_BYTES:
        if name == dtype:
            return dtype
    raise refused(key, value, f"supported are {', '.join(DTYPE_BYTES)}")


def _token_ids(hf: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = hf.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise refused(key, value, "it must be a token id or a list of them")
    return tuple(ids)


def refused(key: str, value: object, fix: str) -> ValueError:
    """Return the error for a value that the decoder cannot honour, with the fix."""
    return ValueError(f"the model's configuration has {key}: {abbreviate(value)}; {fix}")


def _missing(key: str) -> ValueError:
    return ValueError(f"the model's configuration has no {key}; give it in config.json or under model.config")


def experts(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many experts a mixture has, and how many of them a token chooses.

    Hub files of Qwen3 say num_experts, those of Mixtral and all that transformers 5 writes num_local_experts.
    """
    said = {key: hf[key] for key in ("num_experts", "num_local_experts") if hf.get(key) is not None}
    if len(set(map(str, said.values()))) > 1:
        other = abbreviate(said["num_local_experts"])
        raise refused("num_experts", said["num_experts"], f"num_local_experts says {other}: remove one")
    num_experts = integer({"num_experts": next(iter(said.values()), None)}, "num_experts")
    num_chosen = integer(hf, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise refused("num_experts_per_tok", num_chosen, f"there are {num_experts} experts")
    return num_experts, num_chosen


def sparse_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: each `decoder_sparse_step`-th, except those in `mlp_only_layers`."""
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise refused("mlp_only_layers", dense, "it must be a list of layers")
    layers = range(integer(hf, "num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def layers_after_dense(hf: Mapping[str, Any], first_dense: int) -> tuple[bool, ...]:
    """Return which layers have experts: all but the first ones, `first_dense` of them by default."""
    dense = integer(hf, "first_k_dense_replace", first_dense, least=0)
    return tuple(layer >= dense for layer in range(integer(hf, "num_hidden_layers")))


def layers_by_mlp_type(hf: Mapping[str, Any], first_dense: int = 1) -> tuple[bool, ...]:
    """Return which layers have experts: those that `mlp_layer_types` calls sparse, or all but the first."""
    types, num_layers = hf.get("mlp_layer_types"), integer(hf, "num_hidden_layers")
    if types is None:
        return tuple(layer >= first_dense for layer in range(num_layers))
    known = ("dense", "sparse")
    if not isinstance(types, list) or len(types) != num_layers or any(each not in known for each in types):
        raise refused(
            "mlp_layer_types", types, f"one of {' or '.join(known)} for each of {num_layers} layers"
        )
    return tuple(each == "sparse" for each in types)


def grouped_experts(hf: Mapping[str, Any], *, num_shared: int, **more: Any) -> MixtureConfig:
    """Return experts as DeepSeek's files describe them; `more` is of the family."""
    size = integer(hf, "moe_intermediate_size")
    num_experts, num_groups = integer(hf, "n_routed_experts"), integer(hf, "n_group", 1)
    num_chosen, num_chosen_groups = integer(hf, "num_experts_per_tok"), integer(hf, "topk_group", 1)
    best = more.get("group_best", 1)
    if num_experts % num_groups or num_experts // num_groups < best:
        raise refused("n_group", num_groups, f"equal groups of {num_experts} experts, of {best} at least")
    if not num_chosen_groups <= num_groups:
        raise refused("topk_group", num_chosen_groups, f"there are {num_groups} groups")
    if num_chosen > num_chosen_groups * (num_experts // num_groups):
        raise refused("num_experts_per_tok", num_chosen, "the chosen groups have fewer experts")
    return MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=size,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=number(hf, "routed_scaling_factor", 1.0),
        shared_size=size * integer(hf, "n_shared_experts", num_shared, least=0),
        **{"normalizes": False} | more,
    )


def latent_config(hf: Mapping[str, Any]) -> LatentConfig:
    """Return latent attention as DeepSeek's files describe it."""
    if boolean(hf, "attention_bias", False):
        raise refused("attention_bias", True, "latent attention is supported without it")
    interleaves = hf.get("rope_interleave", True)
    if interleaves is None or not boolean(hf, "rope_interleave", True):  # transformers takes null for false
        raise refused("rope_interleave", interleaves, "pairs must lie side by side: it must be true")
    nope_dim, rope_dim = integer(hf, "qk_nope_head_dim"), integer(hf, "qk_rope_head_dim")
    if rope_dim % 2:
        raise refused("qk_rope_head_dim", rope_dim, "the rotary embedding turns pairs: it must be even")
    derived = {"num_key_value_heads": integer(hf, "num_attention_heads"), "head_dim": rope_dim}
    for name, size in (derived | {"qk_head_dim": nope_dim + rope_dim}).items():
        if hf.get(name) not in (None, size):
            raise refused(name, hf[name], f"it follows from other sizes: it must be {size}, or left out")
    rope = rope_config(hf, rope_dim, integer(hf, "max_position_embeddings"))
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return LatentConfig(
        query_rank=None if hf.get("q_lora_rank") is None else integer(hf, "q_lora_rank"),
        rank=integer(hf, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer(hf, "v_head_dim"),
        scale=scale,
    )


def index_config(hf: Mapping[str, Any], *, interleaved: bool) -> IndexConfig:
    """Return the indexer of sparse latent attention; `interleaved` is of the family."""
    rope_dim, head_dim = integer(hf, "qk_rope_head_dim"), integer(hf, "index_head_dim")
    if hf.get("q_lora_rank") is None:
        raise refused("q_lora_rank", None, "an indexer reads compressed queries: give their width")
    if head_dim < rope_dim:
        fix = f"its first qk_rope_head_dim ({rope_dim}) channels are rotated: it must have as many"
        raise refused("index_head_dim", head_dim, fix)
    return IndexConfig(integer(hf, "index_n_heads"), head_dim, integer(hf, "index_topk"), interleaved)


def gated_shared_experts(
    hf: Mapping[str, Any], *, normalizes: bool, may_be_stacked: bool = False
) -> MixtureConfig:
    """Return experts as Qwen's files describe them, with a shared one that a gate weighs."""
    num_experts, num_chosen = integer(hf, "num_experts"), integer(hf, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise refused("num_experts_per_tok", num_chosen, f"there are {num_experts} experts")
    return MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=integer(hf, "moe_intermediate_size"),
        normalizes=normalizes,
        shared_size=integer(hf, "shared_expert_intermediate_size"),
        shared_block="shared_expert",
        has_shared_gate=True,
        may_be_stacked=may_be_stacked,
    )


def gated_delta(hf: Mapping[str, Any], *, is_interleaved: bool = False) -> RecurrentConfig:
    """Return the gated delta rule as Qwen's files describe it."""
    num_keys, num_values = integer(hf, "linear_num_key_heads"), integer(hf, "linear_num_value_heads")
    if num_values % num_keys:
        fix = f"it must be a multiple of linear_num_key_heads ({num_keys})"
        raise refused("linear_num_value_heads", num_values, fix)
    return RecurrentConfig(
        "gated",
        num_keys,
        num_values,
        integer(hf, "linear_key_head_dim"),
        integer(hf, "linear_value_head_dim"),
        integer(hf, "linear_conv_kernel_dim"),
        is_interleaved,
    )


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
INDEXED = "indexed_attention"
_CAUSAL = (
    "such a model, made for embeddings, attends to both sides, and this engine computes causal attention:"
    " use a causal checkpoint, or an engine for bidirectional models"
)


def switched_window(hf: Mapping[str, Any]) -> int | None:
    """Return Qwen's window: `sliding_window` if `use_sliding_window` is true, and otherwise None."""
    if not boolean(hf, "use_sliding_window", False) or hf.get("sliding_window", 4096) is None:
        return None
    return integer(hf, "sliding_window", 4096)


def windows_by_layer_type(hf: Mapping[str, Any]) -> Windows:
    """Return the windows of `layer_types`, or else Qwen2's: sliding from layer `max_window_layers` on."""
    window = switched_window(hf)
    if hf.get("layer_types") is None:
        first = integer(hf, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(integer(hf, "num_hidden_layers")))
    return windows_of_types(hf, window, "sliding layers need use_sliding_window: true and sliding_window")


def windows_of_types(hf: Mapping[str, Any], window: int | None, fix: str) -> Windows:
    """Return `window` for each layer that `layer_types` calls sliding; `fix` says what such layers need."""
    types, num_layers = hf["layer_types"], integer(hf, "num_hidden_layers")
    known = (FULL, SLIDING)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise refused("layer_types", types, f"one of {' or '.join(known)} for each of {num_layers} layers")
    if window is None and SLIDING in types:
        raise refused("layer_types", types, fix)
    return tuple(window if kind == SLIDING else None for kind in types)


def recurrent_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have a recurrent state: those that `layer_types` calls linear.

    By default it is all but each `full_attention_interval`-th.
    """
    types, num_layers = hf.get("layer_types"), integer(hf, "num_hidden_layers")
    if types is None:
        interval = integer(hf, "full_attention_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    known = (FULL, LINEAR)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise refused("layer_types", types, f"one of {' or '.join(known)} for each of {num_layers} layers")
    return tuple(kind == LINEAR for kind in types)


def hybrid_layers(
    has_state: Sequence[bool], has_experts: bool | Sequence[bool], otherwise: Mixer = "attention"
) -> tuple[LayerSpec, ...]:
    """Return layers of which some have a recurrent state, and the others the mixer `otherwise`."""
    plain = layer_specs((None,) * len(has_state), has_experts, otherwise)
    return tuple(replace(each, mixer="recurrent") if has else each for each, has in zip(plain, has_state))


def _layer_type(layer: LayerSpec) -> str:
    if layer.mixer == "recurrent":
        return LINEAR
    if layer.index is not None:
        return INDEXED
    return FULL if layer.window is None else SLIDING


def check_attended(hf: Mapping[str, Any], layers: Sequence[LayerSpec], max_positions: int) -> None:
    """Raise ValueError where config.json asks for other attention than the causal attention of these layers.

    transformers reads `is_causal` for every family, and takes null and 0 for false. A family whose windows do
    not follow `layer_types` ignores it there, or at times applies it to the cache alone; a list that agrees
    with the windows says nothing new, and any other cannot be honoured.
    """
    if (causal := hf.get("is_causal", True)) is not True:
        raise refused("is_causal", causal, _CAUSAL)
    if hf.get("use_bidirectional_attention"):
        raise refused("use_bidirectional_attention", hf["use_bidirectional_attention"], _CAUSAL)
    if hf.get("per_layer_config"):
        raise refused(
            "per_layer_config", hf["per_layer_config"], "all layers have one configuration: remove it"
        )
    types, computed = hf.get("layer_types"), [_layer_type(layer) for layer in layers]
    windows = [layer.window for layer in layers]
    if types is not None and types != computed:
        fix = f"this family's layers are {abbreviate(computed)} by its other keys: remove it"
        raise refused("layer_types", types, fix)
    # If layer_types is absent, transformers cuts its cache to such a window in families whose layers attend
    # to all positions, so that its generated tokens differ from its own forward pass. Qwen's files have a
    # window that is switched off.
    has_switch = str(hf.get("model_type")).startswith("qwen")
    for key in ("attention_chunk_size",) if has_switch else ("attention_chunk_size", "sliding_window"):
        window = hf.get(key)
        if types is None and not any(windows) and isinstance(window, int) and window < max_positions:
            raise refused(key, window, "this family's layers attend to all earlier positions: remove it")
