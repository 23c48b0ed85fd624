"""Define the decoder of a Qwen2-MoE checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    FULL,
    SLIDING,
    boolean,
    decoder_config,
    gated_shared_experts,
    integer,
    sparse_layers,
    switched_window,
    windows_by_layer_type,
)
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
FIELDS = ConfigFields(
    frozenset({
        *("use_sliding_window", "max_window_layers", "qkv_bias", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers"),
    })
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Qwen2 with experts, one of which computes every token, weighted by a gate.
    """
    hf = {**DEFAULTS, **hf}
    mixture = gated_shared_experts(hf, normalizes=boolean(hf, "norm_topk_prob", False))
    if hf.get("layer_types") is None:  # Qwen2's `max_window_layers` counts from the other end
        first_full = integer(hf, "max_window_layers", 28, least=0)
        slides = switched_window(hf) is not None
        layers = range(integer(hf, "num_hidden_layers"))
        hf["layer_types"] = [
            SLIDING if slides and layer % 2 == 0 and layer < first_full else FULL for layer in layers
        ]
    specs = layer_specs(windows_by_layer_type(hf), sparse_layers(hf))
    bias = boolean(hf, "qkv_bias", True)
    return decoder_config(hf, "qwen2_moe", layers=specs, attention_bias=bias, mixture=mixture)
