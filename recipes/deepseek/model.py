"""Which decoder does a DeepSeek-V2 or DeepSeek-V3 checkpoint describe?

R1 is a V3, and Kimi-K2 has V3's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.huggingface import boolean, decoder_config, integer, latent_config, number, refused
from models.mixture_config import MixtureConfig

SHAPE = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEFAULTS = SHAPE | {"v_head_dim": 128, "moe_layer_freq": 1}
V2 = DEFAULTS | {
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
}
V3 = DEFAULTS | {
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
}
V3 |= {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
METHODS = ("greedy", "group_limited_greedy")


def v2(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json of a DeepSeek-V2: chances of experts, of the best groups or of all."""
    hf = {**V2, **hf}
    method = hf.get("topk_method") or METHODS[0]
    if method not in METHODS:
        raise refused("topk_method", method, f"supported are {' and '.join(METHODS)}")
    if boolean(hf, "norm_topk_prob", False):
        raise refused("norm_topk_prob", True, "transformers ignores it for this family: it must be false")
    if method == METHODS[0]:
        hf |= {"n_group": 1, "topk_group": 1}
    return _decoder(hf, "deepseek_v2", first_dense=0, num_shared=2)


def v3(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json of a DeepSeek-V3, whose experts are scored each by itself."""
    normalizes = boolean(hf, "norm_topk_prob", True)
    more = {"scores": "sigmoid", "group_best": 2, "is_corrected": True, "normalizes": normalizes}
    return _decoder({**V3, **hf}, "deepseek_v3", first_dense=3, num_shared=1, **more)


def _decoder(
    hf: Mapping[str, Any], family: str, *, first_dense: int, num_shared: int, **more: Any
) -> DecoderConfig:
    if hf["moe_layer_freq"] != 1:
        raise refused("moe_layer_freq", hf["moe_layer_freq"], "it must be 1")
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
    mixture = MixtureConfig(
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
    return decoder_config(hf, family, windows=(None,) * num_layers, mixture=mixture, latent=latent_config(hf))
