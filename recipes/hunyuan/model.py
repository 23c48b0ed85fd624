"""Translate the config.json of a Hunyuan V1 checkpoint, dense or mixture of experts, into a DecoderConfig.

Fields that describe a variant that is not computed here, such as cross-layer attention, are refused. The
decoder itself is in `models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import boolean, decoder_config, integer, number, refused
from models.config import DecoderConfig, MixtureConfig, layer_specs

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 2}
DENSE_FIELDS = ConfigFields(
    frozenset({"attention_bias", "use_cla", "use_qk_norm"}),
    irrelevant={"eod_token_id": "requests say where they end"},
)
SPARSE_FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "use_cla", "use_qk_norm", "num_experts", "moe_topk"),
        *("moe_intermediate_size", "num_shared_expert"),
    }),
    irrelevant={"eod_token_id": "requests say where they end"},
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
)  # fmt: skip
NORMS = ("query_layernorm", "key_layernorm")


def dense(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Llama whose queries and keys are normed head by head after they are rotated.
    """
    return _decoder({**DEFAULTS, **hf}, "hunyuan_v1_dense", None)


def sparse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json with experts in every layer, and one that computes all."""
    hf = {**DEFAULTS, **hf}
    for key in ("moe_topk", "num_experts", "num_shared_expert"):
        hf[key] = _of_all_layers(hf, key)
    inner, given = integer(hf, "intermediate_size"), _of_all_layers(hf, "moe_intermediate_size")
    if given not in (None, inner):
        raise refused("moe_intermediate_size", given, f"it must be the intermediate_size ({inner})")
    if hf["num_shared_expert"] not in (None, 1):
        raise refused("num_shared_expert", hf["num_shared_expert"], "it must be 1")
    num_experts, num_chosen = integer(hf, "num_experts", 1), integer(hf, "moe_topk", 1)
    if num_chosen > num_experts:
        raise refused("moe_topk", num_chosen, f"there are {num_experts} experts")
    mixture = MixtureConfig(
        num_experts,
        num_chosen,
        inner_size=inner,
        normalizes=True,
        router="gate.wg",
        shared_size=inner,
        shared_block="shared_mlp",
    )
    return _decoder(hf, "hunyuan_v1_moe", mixture)


def _of_all_layers(hf: Mapping[str, Any], key: str) -> object:
    """Return a value that a file may give for each layer, if it is the same for all."""
    value = hf.get(key)
    if not isinstance(value, list):
        return value
    if len(value) != integer(hf, "num_hidden_layers") or any(each != value[0] for each in value):
        raise refused(key, value, "one number for all layers, or the same for each, is supported")
    return value[0]


def _decoder(hf: dict[str, Any], family: str, mixture: MixtureConfig | None) -> DecoderConfig:
    if boolean(hf, "use_cla", False):
        raise refused("use_cla", True, "layers that read another's keys are not supported: it must be false")
    if not boolean(hf, "use_qk_norm", True):
        raise refused("use_qk_norm", False, "transformers norms queries and keys always: it must be true")
    bias, alpha = boolean(hf, "attention_bias", False), _fixed_alpha(hf)
    if alpha is not None:  # a base that alpha stretches once and for all, whatever the length
        key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        theta = number(hf[key], "rope_theta", number(hf, "rope_theta", 10000.0))
        hf = {**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}
    plain = decoder_config(
        hf,
        family,
        layers=layer_specs((None,) * integer(hf, "num_hidden_layers"), mixture is not None),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="rotated",
        mixture=mixture,
    )
    if alpha is not None:
        if plain.head_dim <= 2:
            raise refused("head_dim", plain.head_dim, "a base that alpha stretches needs more than 2")
        theta = plain.rope.theta * alpha ** (plain.head_dim / (plain.head_dim - 2))
        if theta <= 1:
            raise refused("alpha", alpha, f"it makes the base {theta:g}, which must be more than 1")
        plain = replace(plain, rope=replace(plain.rope, theta=theta))
    return replace(plain, qk_norm_names=NORMS)


def _fixed_alpha(hf: Mapping[str, Any]) -> float | None:
    """Return the number that stretches the base of a rotary embedding that is called dynamic."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or not rope.get("alpha"):
        return None
    kind = rope.get("rope_type", rope.get("type"))
    return number(rope, "alpha") if kind == "dynamic" else None
