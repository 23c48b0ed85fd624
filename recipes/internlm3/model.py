"""Define the decoder of an InternLM3 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer, refused
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
# The names in transformers, and those in the files on the hub.
BIASES = (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
FIELDS = ConfigFields(frozenset({name for pair in BIASES for name in pair}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Llama with biases in all linears but the head, or in none.
    """
    hf = {**DEFAULTS, **hf}
    of_attention, of_mlp = (boolean(hf, new, boolean(hf, old, False)) for new, old in BIASES)
    if of_attention != of_mlp:
        raise refused("qkv_bias", of_attention, f"bias is {str(of_mlp).lower()}, and the two must be equal")
    return decoder_config(
        hf,
        "internlm3",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers")),
        attention_bias=of_attention,
        output_bias=of_attention,
        mlp_bias=of_mlp,
    )
