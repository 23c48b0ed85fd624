"""Define the decoder of a GLM-4 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer
from models.config import GATE_UP, NORMS, DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
}
FIELDS = ConfigFields(frozenset({"attention_bias"}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Half of each head is rotated, in pairs of neighbouring dimensions, and the outputs of attention and MLP
    are normed before they are added.
    """
    hf = {**DEFAULTS, **hf}
    return decoder_config(
        hf,
        "glm4",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers")),
        attention_bias=boolean(hf, "attention_bias", True),
        turned=0.5,
        interleaved=True,
        norms=(*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        stored_joined=(GATE_UP,),
    )
