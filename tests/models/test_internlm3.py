"""InternLM3 is read as a Llama with the biases that its file names, in either spelling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipes.assembly.families import decoder_config
from tests.lazy import transformers

HUB = {  # what the hub's file of the 8B says
    "model_type": "internlm3", "bias": False, "qkv_bias": False, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000, "vocab_size": 128512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def theirs(hf: dict[str, Any]) -> Any:
    return transformers.InternLM3Config(**{key: hf[key] for key in hf if key != "model_type"})


@pytest.mark.parametrize("is_biased", [False, True])
def test_a_published_file_is_read_as_it_is_meant(is_biased: bool) -> None:
    hf = HUB | {"qkv_bias": is_biased, "bias": is_biased}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs(hf))
    ours = decoder_config(hf)
    assert ours.num_parameters == sum(each.numel() for each in model.parameters())
    assert (ours.rope.kind, ours.rope.theta, ours.rope.factor) == ("dynamic", 5e7, 6.0)


@pytest.mark.parametrize("said", [{"qkv_bias": True}, {"bias": True}])
def test_biases_that_differ_are_refused_as_by_transformers(said: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=r"qkv_bias: .* the two must be equal"):
        decoder_config(HUB | said)
    with pytest.raises(Exception, match="qkv_bias"):
        theirs(HUB | said)
