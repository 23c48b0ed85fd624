"""Which decoder does a Qwen3-MoE checkpoint describe?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig
from models.huggingface import boolean, decoder_config, experts, integer
from models.mixture_config import MixtureConfig
from models.shown import shown

DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json. As Qwen3, with experts in every `decoder_sparse_step`-th layer.

    A sliding window, if it is switched on, holds in every layer.
    """
    hf = {**DEFAULTS, **hf}
    if hf.get("num_experts") is None and hf.get("num_local_experts") is None:
        hf["num_experts"] = 128
    num_layers, bias = integer(hf, "num_hidden_layers"), boolean(hf, "attention_bias", False)
    window = None
    if boolean(hf, "use_sliding_window", False) and hf.get("sliding_window", 4096) is not None:
        window = integer(hf, "sliding_window", 4096)
    num_experts, num_chosen = experts(hf)
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise ValueError(
            f"the model's configuration has mlp_only_layers: {shown(dense)}; it must be a list of layers"
        )
    mixture = MixtureConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=integer(hf, "moe_intermediate_size"),
        normalizes=boolean(hf, "norm_topk_prob", False),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
    return decoder_config(
        hf,
        "qwen3_moe",
        windows=(window,) * num_layers,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        mixture=mixture,
    )
