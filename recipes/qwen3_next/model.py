"""Define the decoder of a Qwen3-Next checkpoint."""

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
    sparse_layers,
)
from models.checkpoint_names import BESIDE
from models.config import DecoderConfig

STATES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DEFAULTS = STATES | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
FIELDS = ConfigFields(
    frozenset({
        *STATES, *EXPERTS,
        *("attention_bias", "full_attention_interval", "norm_topk_prob", "decoder_sparse_step"),
        *("mlp_only_layers", "num_nextn_predict_layers"),
    }),
    irrelevant={"sliding_window": "no layer has a window", "use_sliding_window": "no layer has a window"},
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Three of four layers keep a state (Gated DeltaNet); in the others, gates weigh what attention returns.
    Norms add one to their weights, a quarter of each head is rotated, and a gate weighs the shared expert.
    """
    hf = {**DEFAULTS, **hf}
    layers = hybrid_layers(recurrent_layers(hf), sparse_layers(hf))
    bias = boolean(hf, "attention_bias", False)
    plain = decoder_config(
        hf,
        "qwen3_next",
        layers=layers,
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        mixture=gated_shared_experts(hf, normalizes=boolean(hf, "norm_topk_prob", True)),
        turned=0.25,
    )
    recurrent = gated_delta(hf, is_interleaved=True)
    further = integer(hf, "num_nextn_predict_layers", 1, least=0)  # published files say nothing of it
    return replace(
        plain,
        recurrent=recurrent,
        has_output_gate=True,
        norms_add_one=True,
        num_unread_layers=further,
        unread_block=BESIDE,
    )
