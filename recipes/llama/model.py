"""Define the decoder of a Llama checkpoint (1, 2, 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer
from models.config import DecoderConfig, layer_specs

DEFAULTS = {"max_position_embeddings": 2048, "eos_token_id": 2}
FIELDS = ConfigFields(frozenset({"attention_bias", "mlp_bias"}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json; one switch gives all four attention products a bias."""
    hf = {**DEFAULTS, **hf}
    bias = boolean(hf, "attention_bias", False)
    return decoder_config(
        hf,
        "llama",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers")),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=boolean(hf, "mlp_bias", False),
    )
