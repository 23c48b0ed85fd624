"""Define the decoders of ERNIE-4.5 checkpoints that read only text, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer, number, refused
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
DENSE = DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128}
SPARSE = DEFAULTS | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
}
DENSE_FIELDS = ConfigFields(frozenset({"use_bias"}))
SPARSE_FIELDS = ConfigFields(
    frozenset({
        *("use_bias", "moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts"),
        *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min"),
    }),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)  # fmt: skip
LEAST_SUM = 1e-12  # `moe_norm_min`: what the sum of chosen weights is raised to before it divides them


def dense(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json: a Llama whose rotary embedding turns neighbouring pairs."""
    return _decoder({**DENSE, **hf}, "ernie4_5", False, None)


def sparse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json with experts.

    The choice is corrected by a bias, and weights are the probabilities of the chosen experts over their sum.
    """
    hf = {**SPARSE, **hf}
    num_layers = integer(hf, "num_hidden_layers")
    first, step = integer(hf, "moe_layer_start_index", 1, least=0), integer(hf, "moe_layer_interval", 1)
    last = hf.get("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else integer(hf, "moe_layer_end_index", least=0)
    if number(hf, "moe_norm_min", LEAST_SUM) > LEAST_SUM:
        raise refused("moe_norm_min", hf["moe_norm_min"], f"it must be at most {LEAST_SUM}")
    num_experts, num_chosen = integer(hf, "moe_num_experts"), integer(hf, "moe_k")
    if num_chosen > num_experts:
        raise refused("moe_k", num_chosen, f"there are {num_experts} experts")
    inner = integer(hf, "moe_intermediate_size")
    if boolean(hf, "use_bias", False):
        raise refused("use_bias", True, "experts have no biases: it must be false")
    mixture = MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=inner,
        normalizes=True,
        is_corrected=True,
        correction="moe_statics.e_score_correction_bias",
        is_correction_row=True,
        shared_size=inner * integer(hf, "moe_num_shared_experts", 2, least=0),
    )
    has_experts = [first <= layer <= last and (layer + 1) % step == 0 for layer in range(num_layers)]
    return _decoder(hf, "ernie4_5_moe", has_experts, mixture)


def _decoder(
    hf: Mapping[str, Any], family: str, has_experts: bool | list[bool], mixture: MixtureConfig | None
) -> DecoderConfig:
    bias = boolean(hf, "use_bias", False)
    return decoder_config(
        hf,
        family,
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers"), has_experts),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        mixture=mixture,
        interleaved=True,
    )
