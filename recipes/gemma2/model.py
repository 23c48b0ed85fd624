"""Define the decoder of a Gemma 2 checkpoint."""

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
    refused,
    windows_by_layer_type,
)
from models.config import DecoderConfig, layer_specs
from recipes.gemma3.model import NORMS

DEFAULTS = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FIELDS = ConfigFields(
    frozenset({"attention_bias", "hidden_activation", "query_pre_attn_scalar", *CAPS}),
    irrelevant={"hidden_act": "hidden_activation says it"},
)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json; every other layer has a window, starting with the first."""
    hf = {**DEFAULTS, **CAPS, **hf}
    if (act := hf.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise refused("hidden_activation", act, "it must be gelu_pytorch_tanh")
    hf["hidden_act"] = "silu"  # older files contain another value, which transformers does not read
    if hf.get("layer_types") is None:
        kinds = ("full" if layer % 2 else "sliding" for layer in range(integer(hf, "num_hidden_layers")))
        hf["layer_types"] = [f"{kind}_attention" for kind in kinds]
    bias, windows = boolean(hf, "attention_bias", False), windows_by_layer_type(hf)
    caps = {key: None if hf[key] is None else number(hf, key) for key in CAPS}
    for key, cap in caps.items():
        if cap == 0:
            raise refused(key, hf[key], "it must be more than 0, or null for none")
    plain = decoder_config(
        hf, "gemma2", layers=layer_specs(windows), attention_bias=bias, output_bias=bias, norms=NORMS
    )
    return replace(
        plain,
        norms_add_one=True,
        gate="gelu_tanh",
        embedding_scale=plain.hidden_size**0.5,
        own_scale=integer(hf, "query_pre_attn_scalar", 256) ** -0.5,
        score_cap=caps["attn_logit_softcapping"],
        logit_cap=caps["final_logit_softcapping"],
    )
