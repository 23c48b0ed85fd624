"""config.json is read as transformers reads it, and what is not supported is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipes.assembly.families import SUPPORTED, config_in, decoder_config, impossible_ends, read
from recipes.schema.reader import load
from tests.each_of import each_of
from tests.lazy import transformers

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
DEEPSEEK = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
DEEPSEEK_V3 = {"model_type": "deepseek_v3"}
PHI3 = LLAMA | {"model_type": "phi3"}
FAMILY_NAMES = ", ".join(SUPPORTED)


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert decoder_config(read(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert decoder_config(read(tmp_path)).eos_token_ids == (7, 9)


def test_end_tokens_that_are_never_chosen_are_left_out_while_another_remains(tmp_path: Path) -> None:
    recipe = load("recipes/any/cpu.yaml", [f"model.path={tmp_path}"])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 99999, -1]}))
    config = config_in(tmp_path)
    assert config.eos_token_ids == (2,)
    assert impossible_ends(recipe, config) == "[99999, -1] of generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [99999]}))
    with pytest.raises(ValueError, match=r": generation_config.json has eos_token_id: 99999; the vocabulary"):
        config_in(tmp_path)
    file.unlink()
    assert impossible_ends(recipe, config_in(tmp_path)) == ""


PACKED, SMALL = torch.zeros(2, dtype=torch.int32), torch.zeros(2).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_weights_tell_their_type_where_config_json_does_not(
    dtype: torch.dtype, key: str, tmp_path: Path
) -> None:
    """As transformers takes it with dtype="auto": of the first tensor by name that has one of a model."""
    other = torch.zeros(2, dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
    tensors = {"model.a": PACKED, "model.b": SMALL, "model.c": torch.zeros(2, dtype=dtype), "model.d": other}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: None}))
    assert decoder_config(read(tmp_path)).dtype == "float32", "there are no weights"
    file = tmp_path / "model.safetensors"
    save_file({"model.a": PACKED, "model.b": SMALL}, file)
    assert decoder_config(read(tmp_path)).dtype == "float32", "no tensor has a model's type"
    save_file(tensors, file)
    loading = transformers.modeling_utils
    assert loading.get_state_dict_dtype(loading.load_state_dict(file, map_location="meta")) == dtype
    assert decoder_config(read(tmp_path)).dtype == str(dtype).removeprefix("torch.")
    text = LLAMA | {"model_type": "mistral", "num_key_value_heads": 4}
    nested = {"model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert decoder_config(read(tmp_path)).dtype == str(dtype).removeprefix("torch.")
    (tmp_path / "config.json").write_text(json.dumps(nested | {"text_config": text | {key: "float16"}}))
    assert decoder_config(read(tmp_path)).dtype == "float16"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file.write_bytes(b"not safetensors")  # which who loads the weights is told
    assert decoder_config(read(tmp_path)).dtype == "float32"


def test_only_dynamic_rope_bounds_what_may_be_shared() -> None:
    assert decoder_config(LLAMA).max_shared_positions is None
    dynamic = {"max_position_embeddings": 40, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert decoder_config(LLAMA | dynamic).max_shared_positions == 40


@each_of(
    "changes, words",
    [
        (
            {"model_type": "gpt2"},
            f"family is 'gpt2'; supported are {FAMILY_NAMES}",
        ),
        ({"model_type": None}, "family is None; supported are deepseek_v2"),
        (DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'; supported are greedy and"),
        (DEEPSEEK | {"norm_topk_prob": True}, "norm_topk_prob: True; .* must be false"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias: True; latent attention"),
        (DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave: False; pairs must lie side by side"),
        (DEEPSEEK | {"qk_rope_head_dim": 15}, "qk_rope_head_dim: 15; .* must be even"),
        (DEEPSEEK_V3 | {"n_group": 7}, "n_group: 7; equal groups of 256 experts, of 2 at least"),
        (DEEPSEEK_V3 | {"topk_group": 9}, "topk_group: 9; there are 8 groups"),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 129}, "num_experts_per_tok: 129; the chosen groups have"),
        (PHI3 | {"quantization_config": {"quant_method": "fp8"}}, "method: 'fp8'; linears that are stored"),
        (PHI3 | {"quantization_config": "gptq"}, "quantization_config: 'gptq'"),
        (PHI3 | {"rope_scaling": {"type": "longrope"}}, "short_factor: None; it must be 8 numbers above 0"),
        (
            PHI3 | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
            "long_factor: .0.0, 0.0, .* it must be 8 numbers above 0",
        ),
        (PHI3 | {"partial_rotary_factor": 0.1}, "partial_rotary_factor: 0.1; an even part of 16"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5; whole heads are turned"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: None; .* int8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3; it must divide num_attention_heads"),
        ({"num_attention_heads": 5}, "hidden_size: 64; give head_dim"),
        ({"head_dim": 7}, "head_dim: 7; .* must be even"),
        (
            {
                "model_type": "hunyuan_v1_dense",
                "head_dim": 2,
                "rope_scaling": {"type": "dynamic", "alpha": 9.0},
            },
            "head_dim: 2; .* needs more than 2",
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1e-9}},
            "alpha: 1e-09; it makes the base .*, which must be more than 1",
        ),
        ({"hidden_size": "64"}, "hidden_size: '64'; it must be an integer from 1 to 16777216"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"attention_bias": "yes"}, "attention_bias: 'yes'; it must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: 'float8_e4m3fn'; supported are float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>'; it must be a token id"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan; it must be a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_config(LLAMA | changes)


def test_an_unreadable_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist; give the directory"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        read(tmp_path)
