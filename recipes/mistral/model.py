"""Define the decoder of a Mistral checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, integer, number, windows_of_types
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
FIELDS = ConfigFields()


MINISTRAL = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL_FIELDS = ConfigFields()


def ministral3(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json of Ministral 3.

    It is a Mistral whose queries grow with the logarithm of their position, past the length that it was first
    trained on.
    """
    hf = {**MINISTRAL, **hf}
    if not hf.get("rope_scaling") and hf.get("rope_parameters") is None:
        hf["rope_parameters"] = YARN
    plain = replace(config(hf), family="ministral3")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rate = number(rope, "llama_4_scaling_beta", 0.0)
    if not rate:
        return plain
    return replace(plain, query_growth=(rate, integer(rope, "original_max_position_embeddings")))


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
    return decoder_config(hf, "mistral", layers=layer_specs(windows))
