"""Define the decoder of a Qwen3.5 checkpoint, dense or with experts.

It is the text model of a checkpoint that reads images, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    gated_delta,
    gated_shared_experts,
    hybrid_layers,
    integer,
    recurrent_layers,
)
from models.checkpoint_names import BESIDE
from models.config import DecoderConfig
from recipes.qwen3_next.model import EXPERTS, STATES

SHARED = STATES | {"max_position_embeddings": 32768, "head_dim": 256}
DENSE = SHARED | {"num_key_value_heads": 4}
SPARSE = SHARED | {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_READ = frozenset({*STATES, "attention_bias", "full_attention_interval", "mtp_num_hidden_layers"})
_IRRELEVANT = {
    "mamba_ssm_dtype": "states are float32",
    "mtp_use_dedicated_embeddings": "a prediction layer with an embedding of its own is refused",
    "sliding_window": "no layer has a window",
    "use_sliding_window": "no layer has a window",
}
DENSE_FIELDS = ConfigFields(_READ, irrelevant=_IRRELEVANT, fixed={"attn_output_gate": (True, None)})
SPARSE_FIELDS = ConfigFields(
    _READ | {*EXPERTS},
    irrelevant=_IRRELEVANT
    | {
        "intermediate_size": "every layer has experts",
        "mlp_only_layers": "every layer has experts",
        "norm_topk_prob": "weights of experts always add up to one",
    },
    fixed={"attn_output_gate": (True, None)},
)


def dense(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json of a dense model."""
    hf = {**DENSE, **hf}
    return _decoder(hf, "qwen3_5_text", has_experts=False)


def sparse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json of a model with experts in every layer."""
    hf = {**SPARSE, **hf}
    hf["intermediate_size"] = hf["moe_intermediate_size"]  # no layer has a dense MLP
    return _decoder(hf, "qwen3_5_moe_text", has_experts=True)


def _decoder(hf: Mapping[str, Any], family: str, *, has_experts: bool) -> DecoderConfig:
    """Return a Qwen3-Next whose projections lie one after the other in the checkpoint."""
    bias = boolean(hf, "attention_bias", False)
    plain = decoder_config(
        hf,
        family,
        layers=hybrid_layers(recurrent_layers(hf), has_experts),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        mixture=gated_shared_experts(hf, normalizes=True, may_be_stacked=True) if has_experts else None,
        turned=0.25,
    )
    return replace(
        plain,
        recurrent=gated_delta(hf),
        has_output_gate=True,
        norms_add_one=True,
        num_unread_layers=integer(hf, "mtp_num_hidden_layers", 1, least=0),
        unread_block=BESIDE,
    )
