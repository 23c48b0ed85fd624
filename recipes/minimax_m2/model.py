"""Define the decoder of a MiniMax-M2 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, experts, integer, refused
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5000000.0,
    "num_experts_per_tok": 8,
    "eos_token_id": 200020,
}
FIELDS = ConfigFields(
    frozenset({"attn_type_list", "rotary_dim", "num_experts", "num_local_experts", "num_experts_per_tok"}),
    irrelevant={
        **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), "such layers are not read"),
        "layernorm_full_attention_beta": "it is of linear attention",
        "layernorm_linear_attention_beta": "it is of linear attention",
        "layernorm_mlp_beta": "transformers does not read it",
    },
    fixed={
        "scoring_func": ("sigmoid", None),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", None),
        "use_routing_bias": (True, None),
        "shared_intermediate_size": (0, None),
    },
)


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Queries and keys are normed over all heads of a token together, a part of each head is rotated, and each
    expert is scored by itself.
    """
    hf = {**DEFAULTS, **hf}
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_local_experts"] = 256
    kinds = hf.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise refused("attn_type_list", kinds, "linear attention is not supported: it must be 1 throughout")
    if hf.get("rotary_dim") is not None and hf.get("partial_rotary_factor") is None:
        hf["partial_rotary_factor"] = integer(hf, "rotary_dim") / integer(hf, "head_dim")
    num_experts, num_chosen = experts(hf)
    mixture = MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=integer(hf, "intermediate_size"),
        normalizes=True,
        block="block_sparse_moe",
        roles=("w1", "w3", "w2"),
        scores="sigmoid",
        is_corrected=True,
        correction="e_score_correction_bias",
    )
    return decoder_config(
        hf,
        "minimax_m2",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers"), True),
        qk_norm="joined",
        mixture=mixture,
        turned=1.0,
    )
