"""Which decoder does a Mistral checkpoint describe?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.huggingface import decoder_config, integer
from models.shown import shown

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "eos_token_id": 2,
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json. The sliding window, unless null, holds in every layer."""
    hf = {**DEFAULTS, **hf}
    window = None if hf["sliding_window"] is None else integer(hf, "sliding_window")
    types = hf.get("layer_types") or []
    if not isinstance(types, list) or any(each != types[0] for each in types):
        raise ValueError(
            f"the model's configuration has layer_types: {shown(types)}; "
            "a mistral has one window for all layers: leave layer_types out"
        )
    return decoder_config(hf, "mistral", windows=(window,) * integer(hf, "num_hidden_layers"))
