"""Gemma 2's own features are computed as in transformers; what is not supported is refused by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipes.assembly.decoders import shape_of
from recipes.assembly.families import decoder_config
from tests.device_kinds import machine, stand_in_alone
from tests.lazy import transformers

HUB = {  # what the hub's file of the 9B says
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}  # fmt: skip


def theirs(hf: dict[str, Any]) -> Any:
    return transformers.Gemma2Config(**{key: hf[key] for key in hf if key != "model_type"})


def test_a_published_file_is_read_as_it_is_meant() -> None:
    with torch.device("meta"):
        model = transformers.Gemma2ForCausalLM(theirs(HUB))
    ours = decoder_config(HUB)
    assert ours.num_parameters == sum(each.numel() for each in model.parameters())
    kinds = [kind[0] == "s" for kind in model.config.layer_types]
    assert ours.windows == tuple(4096 if has_window else None for has_window in kinds)
    assert ours.windows[:2] == (4096, None)
    assert (ours.score_cap, ours.logit_cap, ours.scale) == (50.0, 30.0, 1 / 16)


def test_a_cap_of_null_is_none() -> None:
    ours = decoder_config(HUB | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (ours.score_cap, ours.logit_cap) == (None, None)


@stand_in_alone
def test_fused_attention_of_an_npu_is_refused_by_the_cap_of_scores() -> None:
    config = decoder_config(HUB | {"head_dim": 128, "dtype": "bfloat16"})
    words = "attn_logit_softcapping is 50; .* no cap of scores: .* set device.attention to reference"
    with pytest.raises(ValueError, match=words):
        machine("npu", "fused").operators(shape_of(128, config))[1].check()
    machine("npu", "reference").operators(shape_of(128, config))[1].check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping: 0; it must be more than 0, or null"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping: 'x'; it must be a number"),
        ({"hidden_activation": "gelu"}, "hidden_activation: 'gelu'; it must be gelu_pytorch_tanh"),
        ({"layer_types": ["full_attention"]}, "for each of 42 layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_config(HUB | changes)
