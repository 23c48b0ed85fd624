"""Define the decoder of a Qwen3-MoE checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    experts,
    integer,
    sparse_layers,
    switched_window,
)
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
FIELDS = ConfigFields(
    frozenset({
        *("use_sliding_window", "attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    }),
    irrelevant={"max_window_layers": "a window is of all layers"},
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Qwen3 with experts in every `decoder_sparse_step`-th layer.

    A sliding window, if it is enabled, applies to every layer.
    """
    hf = {**DEFAULTS, **hf}
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_experts"] = 128
    num_layers, bias = integer(hf, "num_hidden_layers"), boolean(hf, "attention_bias", False)
    num_experts, num_chosen = experts(hf)
    mixture = MixtureConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=integer(hf, "moe_intermediate_size"),
        normalizes=boolean(hf, "norm_topk_prob", False),
    )
    return decoder_config(
        hf,
        "qwen3_moe",
        layers=layer_specs((switched_window(hf),) * num_layers, sparse_layers(hf)),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        mixture=mixture,
    )
