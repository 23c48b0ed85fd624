"""Define the decoder of a Hy3 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    experts,
    integer,
    layers_by_mlp_type,
    number,
    refused,
)
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "mlp_bias", "mlp_layer_types"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "num_shared_experts"),
        *("moe_intermediate_size", "router_scaling_factor", "num_nextn_predict_layers"),
    }),
    irrelevant={
        "enable_moe_fp32_combine": "it rounds a sum in narrow types otherwise",
        "first_k_dense_replace": "mlp_layer_types says it",
    },
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Queries and keys are normed head by head before they are rotated, and experts are chosen as in
    DeepSeek-V3, without groups.
    """
    hf = {**DEFAULTS, **hf}
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_experts"] = 192
    if boolean(hf, "mlp_bias", False):
        raise refused("mlp_bias", True, "experts have no biases: it must be false")
    num_experts, num_chosen = experts(hf)
    inner = integer(hf, "moe_intermediate_size")
    mixture = MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=inner,
        normalizes=True,
        scores="sigmoid",
        is_corrected=True,
        correction="expert_bias",
        router="router.gate",
        scale=number(hf, "router_scaling_factor", 2.826),
        shared_size=inner * integer(hf, "num_shared_experts", 1, least=0),
        shared_block="shared_mlp",
    )
    has_experts, bias = layers_by_mlp_type(hf), boolean(hf, "attention_bias", False)
    return decoder_config(
        hf,
        "hy_v3",
        layers=layer_specs((None,) * len(has_experts), has_experts),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        mixture=mixture,
    )
