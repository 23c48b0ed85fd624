"""Define the decoder of a gpt-oss checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    experts,
    integer,
    number,
    refused,
    windows_by_layer_type,
)
from models.config import DecoderConfig, MixtureConfig, layer_specs
from models.quantization import MXFP4_BLOCK

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "use_sliding_window": True,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("swiglu_alpha", "swiglu_limit"),
    }),
    irrelevant={
        "experts_per_token": "num_experts_per_tok says it",
        "initial_context_length": "rope_scaling says it",
    },
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Every other layer has a window, starting with the first, and all layers have experts.
    """
    hf = {**DEFAULTS, **hf}
    if not hf.get("rope_scaling") and hf.get("rope_parameters") is None:  # an empty mapping means no YaRN
        hf["rope_parameters"] = YARN
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_local_experts"] = 128
    num_layers, bias = integer(hf, "num_hidden_layers"), boolean(hf, "attention_bias", True)
    if hf.get("layer_types") is None:
        kinds = ("full" if layer % 2 else "sliding" for layer in range(num_layers))
        hf["layer_types"] = [f"{kind}_attention" for kind in kinds]
    num_experts, num_chosen = experts(hf)
    inner, hidden = integer(hf, "intermediate_size"), integer(hf, "hidden_size")
    if hf.get("quantization_config") and (inner % MXFP4_BLOCK or hidden % MXFP4_BLOCK):
        raise refused(
            "intermediate_size", inner, f"in mxfp4 it and hidden_size are multiples of {MXFP4_BLOCK}"
        )
    mixture = MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=inner,
        normalizes=True,
        router="router",
        is_biased=True,
        is_stacked=True,
    )
    windows = windows_by_layer_type(hf)
    plain = decoder_config(
        hf,
        "gpt_oss",
        layers=layer_specs(windows, True),
        mixture=mixture,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )
    slope, limit = number(hf, "swiglu_alpha", 1.702), number(hf, "swiglu_limit", 7.0)
    rope = replace(plain.rope, is_within=True)
    return replace(plain, rope=rope, has_sinks=True, gate="clamped", gate_slope=slope, gate_limit=limit)
