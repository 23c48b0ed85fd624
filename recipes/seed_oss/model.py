"""Define the decoder of a Seed-OSS checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "eos_token_id": 2,
}
FIELDS = ConfigFields(
    frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    irrelevant={"residual_dropout": "it matters in training alone"},
)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Qwen2 whose heads together may be wider than its hidden size.
    """
    hf = {**DEFAULTS, **hf}
    return decoder_config(
        hf,
        "seed_oss",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers")),
        attention_bias=boolean(hf, "attention_bias", True),
        output_bias=boolean(hf, "attention_out_bias", False),
        mlp_bias=boolean(hf, "mlp_bias", False),
    )
