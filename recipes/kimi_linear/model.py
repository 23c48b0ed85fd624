"""Define the decoder of a Kimi-Linear checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    FULL,
    LINEAR,
    boolean,
    decoder_config,
    grouped_experts,
    hybrid_layers,
    integer,
    latent_config,
    layers_after_dense,
    layers_by_mlp_type,
    recurrent_layers,
    refused,
)
from models.config import DecoderConfig, RecurrentConfig

LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
STATES = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
# The names of these in `linear_attn_config`, which counts before them
OF_STATES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # lists of layers there, and the kind of each
DEFAULTS = (
    LATENTS
    | STATES
    | {
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 163586,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    }
)
NO_POSITIONS = "keys carry no positions"
FIELDS = ConfigFields(
    frozenset({
        *LATENTS, *STATES, *("q_lora_rank", "attention_bias", "linear_attn_config", "mlp_layer_types"),
        *("first_k_dense_replace", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group"),
        *("topk_group", "norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size"),
        *("num_nextn_predict_layers", "qk_head_dim"),
    }),
    irrelevant={
        "head_dim": "qk_rope_head_dim says it",
        "use_grouped_topk": "n_group says it",
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), NO_POSITIONS),
        **dict.fromkeys(("partial_rotary_factor", "original_max_position_embeddings"), NO_POSITIONS),
    },
    fixed={
        "mla_use_nope": (True, None),
        "moe_layer_freq": (1, None),
        "moe_router_activation_func": ("sigmoid", None),
    },
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Three of four layers keep a state (Kimi Delta Attention); the others have latent attention without
    positions. Experts are chosen as in DeepSeek-V3.
    """
    hf = {**DEFAULTS, **hf}
    said = hf.get("linear_attn_config") or {}
    known = {*OF_STATES, *LISTS}
    if not isinstance(said, Mapping) or not set(said) <= known:
        fix = f"it must be a mapping of some of {', '.join(sorted(known))}"
        raise refused("linear_attn_config", said, fix)
    hf |= {name: said[key] for key, name in OF_STATES.items() if key in said}
    is_by_type = hf.get("mlp_layer_types") is not None
    has_experts = layers_by_mlp_type(hf) if is_by_type else layers_after_dense(hf, 1)
    if hf.get("layer_types") is None:
        hf["layer_types"] = _layer_types(hf, said)
    layers = hybrid_layers(recurrent_layers(hf), has_experts, "latent")
    mixture = grouped_experts(
        hf,
        num_shared=1,
        scores="sigmoid",
        group_best=2,
        is_corrected=True,
        normalizes=boolean(hf, "norm_topk_prob", True),
        block="block_sparse_moe",
        roles=("w1", "w3", "w2"),
    )
    latent = latent_config(hf)
    plain = decoder_config(hf, "kimi_linear", layers=layers, mixture=mixture, latent=latent)
    heads, width = integer(hf, "linear_num_heads"), integer(hf, "linear_head_dim")
    recurrent = RecurrentConfig(
        "kimi", heads, heads, width, width, conv_width=integer(hf, "linear_conv_kernel_dim")
    )
    return replace(plain, recurrent=recurrent, rope=replace(plain.rope, kind="none"))


def _layer_types(hf: Mapping[str, Any], said: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer by the lists of `linear_attn_config`, which count layers from 1.

    Without these, each fourth layer after the first has no state.
    """
    num_layers = integer(hf, "num_hidden_layers")
    if not all(name in said for name in LISTS):
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    for name in LISTS:
        if not isinstance(said[name], list) or any(type(number) is not int for number in said[name]):
            raise refused(f"linear_attn_config.{name}", said[name], "it must be a list of layers")
    types = {number: kind for name, kind in LISTS.items() for number in said[name]}
    count = sum(len(said[name]) for name in LISTS)
    if count != num_layers or set(types) != set(range(1, num_layers + 1)):
        fix = f"each of the layers 1 to {num_layers} must be in one of its lists"
        raise refused("linear_attn_config", said, fix)
    return [types[number] for number in range(1, num_layers + 1)]
