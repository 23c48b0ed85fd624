"""Define the decoder of a GLM-4.5 or GLM-4.6 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    grouped_experts,
    integer,
    layers_after_dense,
)
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}
FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "use_qk_norm", "first_k_dense_replace", "n_group", "topk_group"),
        *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("routed_scaling_factor", "moe_intermediate_size", "num_nextn_predict_layers"),
    }),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Half of each head is rotated, and experts are chosen as in DeepSeek-V3.
    """
    hf = {**DEFAULTS, **hf}
    return decoder_config(
        hf,
        "glm4_moe",
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers"), layers_after_dense(hf, 1)),
        attention_bias=boolean(hf, "attention_bias", False),
        qk_norm="heads" if boolean(hf, "use_qk_norm", False) else "none",
        mixture=grouped_experts(
            hf,
            num_shared=1,
            scores="sigmoid",
            group_best=2,
            is_corrected=True,
            normalizes=boolean(hf, "norm_topk_prob", True),
        ),
        turned=0.5,
    )
