"""Define the decoder of a Mixtral checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, experts, integer
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
FIELDS = ConfigFields(frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"}))


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json: a Mistral with experts in every layer."""
    hf = {**DEFAULTS, **hf}
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_local_experts"] = 8
    num_layers = integer(hf, "num_hidden_layers")
    window = None if hf.get("sliding_window") is None else integer(hf, "sliding_window")
    num_experts, num_chosen = experts(hf)
    mixture = MixtureConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=integer(hf, "intermediate_size"),
        normalizes=True,
        block="block_sparse_moe",
        roles=("w1", "w3", "w2"),
    )
    return decoder_config(hf, "mixtral", layers=layer_specs((window,) * num_layers, True), mixture=mixture)
