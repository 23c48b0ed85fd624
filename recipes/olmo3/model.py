"""Define the decoder of an OLMo 3 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    integer,
    number,
    rope_config,
    ropes_by_layer_type,
    windows_of_types,
)
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "sliding_window": 4096,
    "eos_token_id": 50279,
}
FIELDS = ConfigFields(frozenset({"attention_bias"}))
NORMS = ("", "", "post_attention_layernorm", "post_feedforward_layernorm")


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    The outputs of attention and MLP are normed, and their inputs are not; queries and keys are normed over
    all heads of a token together. Three layers of four have a window, and a rotary embedding of their own.
    """
    hf = {**DEFAULTS, **hf}
    num_layers, window = integer(hf, "num_hidden_layers"), hf["sliding_window"]
    if hf.get("layer_types") is None:
        kinds = ("sliding" if layer % 4 else "full" for layer in range(1, num_layers + 1))
        hf["layer_types"] = [f"{kind}_attention" for kind in kinds]
    window = None if window is None else integer(hf, "sliding_window")
    windows = windows_of_types(hf, window, "sliding layers need a sliding_window")
    theta = number(hf, "rope_theta")
    full, local = ropes_by_layer_type(hf, theta=theta, local_theta=theta)
    bias = boolean(hf, "attention_bias", False)
    plain = decoder_config(
        {**hf, "rope_scaling": None, "rope_parameters": full},
        "olmo3",
        layers=layer_specs(windows),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="joined",
        norms=NORMS,
    )
    local_rope = rope_config({"rope_parameters": local}, plain.head_dim, plain.max_positions)
    return replace(plain, window_rope=local_rope)
