"""Small checkpoints whose attention scores are changed: by caps, or by sinks."""

from __future__ import annotations

import torch

from tests.models.variants import HALF, Variant, yarn

SCORE_VARIANTS = [
    Variant(
        "gpt_oss",
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 21},
        yarn(truncate=False),
        old=True,
    ),
    Variant(
        "gpt_oss_half",
        "gpt_oss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "sliding_window": 7,
            "layer_types": HALF,
            "num_key_value_heads": 1,
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.1,
            "rms_norm_eps": 1e-3,
        },
        yarn(beta_fast=16.0, beta_slow=2.0),
        saved_as=torch.bfloat16,
        shard_size="60KB",
    ),
    Variant(
        "gpt_oss_unbiased",
        "gpt_oss",
        {
            "head_dim": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 37,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        old=True,
    ),
    Variant(
        "gemma2_layer_types",
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 21,
            "layer_types": HALF,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": None,
        },
        yarn(),
        saved_as=torch.bfloat16,
        shard_size="60KB",
    ),
    Variant(
        "gemma2_uncapped",
        "gemma2",
        {
            "head_dim": 20,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "rms_norm_eps": 1e-4,
            "attn_logit_softcapping": None,
        },
        saved_as=torch.float16,
    ),
]
