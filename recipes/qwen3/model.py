"""Define the decoder of a Qwen3 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, windows_by_layer_type
from models.config import DecoderConfig, layer_specs

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
FIELDS = ConfigFields(frozenset({"use_sliding_window", "max_window_layers", "attention_bias"}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Queries and keys are normed head by head before they are rotated.
    """
    hf = {**DEFAULTS, **hf}
    bias = boolean(hf, "attention_bias", False)
    return decoder_config(
        hf,
        "qwen3",
        layers=layer_specs(windows_by_layer_type(hf)),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
    )
