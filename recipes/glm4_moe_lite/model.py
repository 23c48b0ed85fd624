"""Define the decoder of a GLM-4.7-Flash checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    grouped_experts,
    latent_config,
    layers_by_mlp_type,
)
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "eos_token_id": 1,
}
FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "mlp_layer_types", "n_group", "topk_group"),
        *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("routed_scaling_factor", "moe_intermediate_size", "num_nextn_predict_layers"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("rope_interleave", "qk_head_dim"),
    }),
    irrelevant={"first_k_dense_replace": "mlp_layer_types says it"},
    fixed={"topk_method": ("noaux_tc", None)},
    aliases={"num_local_experts": "n_routed_experts"},
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Attention is by latents and experts are chosen as in DeepSeek-V3; `mlp_layer_types` says which layers have
    experts.
    """
    # An explicit null of q_lora_rank means that queries are not compressed
    hf = {**DEFAULTS, **hf}
    mixture = grouped_experts(
        hf,
        num_shared=1,
        scores="sigmoid",
        group_best=2,
        is_corrected=True,
        normalizes=boolean(hf, "norm_topk_prob", True),
    )
    has_experts = layers_by_mlp_type(hf)
    layers = layer_specs((None,) * len(has_experts), has_experts, "latent")
    return decoder_config(hf, "glm4_moe_lite", layers=layers, mixture=mixture, latent=latent_config(hf))
