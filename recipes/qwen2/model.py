"""Define the decoder of a Qwen2 or Qwen2.5 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, windows_by_layer_type
from models.config import DecoderConfig, layer_specs

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
FIELDS = ConfigFields(frozenset({"use_sliding_window", "max_window_layers"}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Queries, keys and values have a bias, the output has none.
    """
    hf = {**DEFAULTS, **hf}
    return decoder_config(hf, "qwen2", layers=layer_specs(windows_by_layer_type(hf)), attention_bias=True)
