"""What does a Hugging Face config.json say of experts, and of attention by latents?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from borders.shown import shown
from models.checkpoint.huggingface import boolean, integer, number, refused, rope_config
from models.latent_config import LatentConfig
from models.mixture_config import MixtureConfig


def experts(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many experts a mixture has, and how many of them a token chooses.

    Hub files of Qwen3 say num_experts, those of Mixtral and all that transformers 5 writes num_local_experts.
    """
    said = {key: hf[key] for key in ("num_experts", "num_local_experts") if hf.get(key) is not None}
    if len(set(map(str, said.values()))) > 1:
        other = shown(said["num_local_experts"])
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


def grouped_experts(
    hf: Mapping[str, Any], *, first_dense: int, num_shared: int, **more: Any
) -> MixtureConfig:
    """Return experts as DeepSeek's files describe them, in all layers but the first.

    `more` is of the family.
    """
    num_layers, size = integer(hf, "num_hidden_layers"), integer(hf, "moe_intermediate_size")
    dense = integer(hf, "first_k_dense_replace", first_dense, least=0)
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
        layers=tuple(layer >= dense for layer in range(num_layers)),
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
    rope = rope_config(hf, rope_dim, integer(hf, "max_position_embeddings"))
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return LatentConfig(
        query_rank=None if hf.get("q_lora_rank") is None else integer(hf, "q_lora_rank"),
        rank=integer(hf, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer(hf, "v_head_dim"),
        scale=scale,
    )
