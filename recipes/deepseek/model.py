"""Define the decoder of a DeepSeek-V2, DeepSeek-V3 or DeepSeek-V3.2 checkpoint.

R1 is a V3, and Kimi-K2 has the shape of V3. V3.2 is a V3 whose layers choose the tokens that they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    grouped_experts,
    index_config,
    integer,
    latent_config,
    layers_after_dense,
    layers_by_mlp_type,
    refused,
)
from models.config import Choosing, DecoderConfig, layer_specs

SHAPE = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEFAULTS: dict[str, float] = {**SHAPE, "v_head_dim": 128, "moe_layer_freq": 1}
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
INDEX = {"index_topk": 2048, "index_head_dim": 128}
V32 = V3 | INDEX | {"max_position_embeddings": 163840, "index_n_heads": 64}
METHODS = ("greedy", "group_limited_greedy")

_READ = frozenset({
    *SHAPE,
    *("v_head_dim", "attention_bias", "moe_layer_freq", "first_k_dense_replace", "n_group", "topk_group"),
    *("topk_method", "norm_topk_prob", "routed_scaling_factor", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "qk_head_dim"),
})  # fmt: skip
V2_FIELDS = ConfigFields(
    _READ,
    irrelevant={"rope_interleave": "pairs always lie side by side", "head_dim": "qk_rope_head_dim says it"},
    fixed={"scoring_func": ("softmax", None), "mlp_bias": (False, None)},
    aliases={"num_experts": "n_routed_experts"},
)
V3_FIELDS = ConfigFields(
    _READ - {"topk_method"} | {"rope_interleave", "num_nextn_predict_layers"},
    fixed={"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
V32_FIELDS = ConfigFields(
    V3_FIELDS.read | {*INDEX, "index_n_heads", "mlp_layer_types"},
    irrelevant={"head_dim": "qk_rope_head_dim says it"},
    fixed={**V3_FIELDS.fixed, "mlp_bias": (False, None), "indexer_rope_interleave": (False, None)},
    aliases={**V3_FIELDS.aliases, "num_experts": "n_routed_experts"},
)


def v2(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json of DeepSeek-V2.

    Experts are chosen by softmax scores, among those of the best groups or among all.
    """
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
    """Return the decoder of a parsed config.json of DeepSeek-V3, which scores each expert by a sigmoid."""
    # transformers reads null as false.
    normalizes = hf.get("norm_topk_prob", True) is not None and boolean(hf, "norm_topk_prob", True)
    more = {"scores": "sigmoid", "group_best": 2, "is_corrected": True, "normalizes": normalizes}
    return _decoder({**V3, **hf}, "deepseek_v3", first_dense=3, num_shared=1, **more)


def v32(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json of DeepSeek-V3.2, of which each layer has an indexer.

    The indexer rotates halves, whereas latent attention rotates pairs that lie side by side.
    """
    hf = {**V32, **hf}
    indexes: list[Choosing] = ["own"] * integer(hf, "num_hidden_layers")
    return sparse_decoder(hf, "deepseek_v32", indexes)


def sparse_decoder(
    hf: Mapping[str, Any], family: str, indexes: Sequence[Choosing], *, interleaved: bool = False
) -> DecoderConfig:
    """Return a decoder with sparse latent attention, whose layers choose as `indexes` say.

    `interleaved` says whether its indexers rotate pairs that lie side by side.
    """
    _check_freq(hf)
    has_experts = layers_by_mlp_type(hf, integer(hf, "first_k_dense_replace", 3, least=0))
    plain = layer_specs((None,) * len(has_experts), has_experts, "latent")
    return decoder_config(
        hf,
        family,
        layers=tuple(replace(each, index=index) for each, index in zip(plain, indexes)),
        mixture=grouped_experts(
            hf,
            num_shared=1,
            scores="sigmoid",
            group_best=2,
            is_corrected=True,
            normalizes=boolean(hf, "norm_topk_prob", True),
        ),
        latent=replace(latent_config(hf), index=index_config(hf, interleaved=interleaved)),
    )


def _decoder(hf: Mapping[str, Any], family: str, *, first_dense: int, **more: Any) -> DecoderConfig:
    _check_freq(hf)
    has_experts = layers_after_dense(hf, first_dense)
    layers = layer_specs((None,) * len(has_experts), has_experts, "latent")
    mixture, latent = grouped_experts(hf, **more), latent_config(hf)
    return decoder_config(hf, family, layers=layers, mixture=mixture, latent=latent)


def _check_freq(hf: Mapping[str, Any]) -> None:
    """Raise ValueError unless all layers after the first dense ones have experts."""
    if hf.get("moe_layer_freq", 1) != 1:
        raise refused("moe_layer_freq", hf["moe_layer_freq"], "it must be 1")
