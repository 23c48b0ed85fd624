"""Define the decoder of a Mistral checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, integer, windows_of_types
from models.config import DecoderConfig

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
FIELDS = ConfigFields()


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    The sliding window, unless null, applies to every layer, or to those that `layer_types` names:
    transformers reads a Mistral with this key as a Ministral.
    """
    hf = {**DEFAULTS, **hf}
    window = None if hf["sliding_window"] is None else integer(hf, "sliding_window")
    windows = (window,) * integer(hf, "num_hidden_layers")
    if hf.get("layer_types") is not None:
        windows = windows_of_types(hf, window, "sliding layers need a sliding_window")
    return decoder_config(hf, "mistral", windows=windows)
