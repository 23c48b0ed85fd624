"""Define the decoder of a Gemma 3 checkpoint that reads only text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import (
    boolean,
    decoder_config,
    integer,
    refused,
    rope_config,
    ropes_by_layer_type,
    windows_by_layer_type,
)
from models.config import DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
}
UNUSED = ("attn_logit_softcapping", "final_logit_softcapping")
NORMS = tuple(
    f"{place}_layernorm" for place in ("input", "pre_feedforward", "post_attention", "post_feedforward")
)
FIELDS = ConfigFields(
    frozenset({
        *("attention_bias", "hidden_activation", "query_pre_attn_scalar", *UNUSED),
        *("sliding_window_pattern", "rope_local_base_freq"),
    }),
    irrelevant={"hidden_act": "hidden_activation says it"},
)  # fmt: skip


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    Layers with a window have a rotary embedding of their own.
    """
    hf = {**DEFAULTS, **hf}
    for key in UNUSED:
        if hf.get(key) is not None:
            raise refused(key, hf[key], "no published Gemma 3 has it: leave it out")
    if (act := hf.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise refused("hidden_activation", act, "it must be gelu_pytorch_tanh")
    if hf.get("layer_types") is None:
        every, last = integer(hf, "sliding_window_pattern", 6), integer(hf, "num_hidden_layers")
        kinds = ("sliding" if layer % every else "full" for layer in range(1, last + 1))
        hf["layer_types"] = [f"{kind}_attention" for kind in kinds]
    full, local = ropes_by_layer_type(hf, theta=1e6, local_theta=1e4)
    bias, windows = boolean(hf, "attention_bias", False), windows_by_layer_type(hf)
    hf |= {"rope_scaling": None, "rope_parameters": full}
    hf.pop("original_max_position_embeddings", None)  # transformers reads only the one of each rope
    plain = decoder_config(
        hf,
        "gemma3_text",
        layers=layer_specs(windows),
        attention_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        norms=NORMS,
    )
    return replace(
        plain,
        rope=replace(plain.rope, is_within=True),
        window_rope=rope_config({"rope_parameters": local}, plain.head_dim, plain.max_positions),
        norms_add_one=True,
        gate="gelu_tanh",
        embedding_scale=plain.hidden_size**0.5,
        own_scale=integer(hf, "query_pre_attn_scalar", 256) ** -0.5,
    )
