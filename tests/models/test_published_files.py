"""Published config.json files of families are read as they are meant, and have transformers' parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.config import DecoderConfig
from recipes.assembly.families import decoder_config
from tests.each_of import each_of
from tests.lazy import transformers
from tests.models.families import CLASSES

GEMMA2 = {  # what the hub's file of the 9B says
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "head_dim": 256, "eos_token_id": [1, 106], "rms_norm_eps": 1e-06,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 1000000,
    "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "rope_local_base_freq": 10000, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_1B = GEMMA3 | {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "sliding_window": 512, "max_position_embeddings": 32768, "rope_scaling": None,
}  # fmt: skip
GEMMA3_27B = GEMMA3 | {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
INTERNLM3 = {  # of the 8B
    "model_type": "internlm3", "bias": False, "qkv_bias": False, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000, "vocab_size": 128512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPT_OSS = {  # of the 20b
    "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "quantization_config": MXFP4, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088, "torch_dtype": "bfloat16",
}  # fmt: skip


def theirs(hf: dict[str, Any]) -> Any:
    """Transformers' configuration of a file."""
    made = getattr(transformers, CLASSES[hf["model_type"]][0])
    return made(**{key: hf[key] for key in hf if key not in ("model_type", "quantization_config")})


def said(ours: DecoderConfig) -> dict[str, Any]:
    """What is compared with what a file means."""
    local = ours.window_rope
    return {
        "rope": (ours.rope.kind, ours.rope.theta, ours.rope.factor, ours.rope.truncate),
        "local": local and (local.kind, local.theta),
        "caps": (ours.score_cap, ours.logit_cap),
        "scale": ours.scale,
        "positions": ours.reach,
    }


@each_of(
    "hf, meant",
    [
        (GEMMA2, {"caps": (50.0, 30.0), "scale": 1 / 16}),
        (
            GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"caps": (None, None)},
        ),
        (GEMMA3_1B, {"rope": ("default", 1e6, 1.0, True), "local": ("default", 1e4), "positions": 32768}),
        (GEMMA3_27B, {"rope": ("linear", 1e6, 8.0, True), "local": ("default", 1e4), "scale": 168**-0.5}),
        (INTERNLM3, {"rope": ("dynamic", 5e7, 6.0, True)}),
        (INTERNLM3 | {"qkv_bias": True, "bias": True}, {}),
        (GPT_OSS, {"rope": ("yarn", 150000, 32.0, False), "positions": 131072}),
    ],
)
def test_a_published_file_is_read_as_it_is_meant(hf: dict[str, Any], meant: dict[str, Any]) -> None:
    """What is stretched is within the positions."""
    ours, config = decoder_config(hf), theirs(hf)
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[hf["model_type"]][1])(config)
    assert ours.num_parameters == sum(each.numel() for each in model.parameters())
    found = said(ours)
    assert {name: found[name] for name in meant} == meant
    if hf.get("sliding_window"):
        has_window = [kind[0] == "s" for kind in config.layer_types]
        assert ours.windows == tuple(hf["sliding_window"] if each else None for each in has_window)


@pytest.mark.parametrize("given", [{"qkv_bias": True}, {"bias": True}])
def test_biases_that_differ_are_refused_as_by_transformers(given: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=r"qkv_bias: .* the two must be equal"):
        decoder_config(INTERNLM3 | given)
    with pytest.raises(Exception, match="qkv_bias"):
        theirs(INTERNLM3 | given)
