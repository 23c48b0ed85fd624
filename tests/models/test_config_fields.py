"""Fields of config.json that change what transformers computes are honoured, or refused by their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.assembly.families import FAMILIES, decoder_config, read
from tests.each_of import each_of
from tests.lazy import transformers
from tests.models.families import VARIANTS, VOCABULARY, Variant, expected_logprobs, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.test_decoder import make_decoder, run_in_chunks

FileOf = Callable[[str], dict[str, Any]]
FULL, SLIDING = "full_attention", "sliding_attention"
# The first of each
OF_FAMILY = {each.family: each for each in reversed([*VARIANTS, *RECURRENT_VARIANTS, *SPARSE_VARIANTS])}
PROMPT = np.random.default_rng(7).integers(0, VOCABULARY, 96).tolist()
FACTORS = {"short_factor": [1.0, 1.1, 1.4, 2.0, 2.1, 2.3], "long_factor": [1.1, 2.9, 4.5, 7.5, 8.0, 9.0]}
PHI3_ROPE = {"type": "yarn", **FACTORS}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
LINEAR = GROWING | {"rope_type": "linear", "original_max_position_embeddings": 16}
GEMMA_ROPES = {
    FULL: {
        "rope_type": "llama3",
        "rope_theta": 9000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    SLIDING: {"rope_type": "default", "rope_theta": 9000.0},
}


def changed(variant: Variant, changes: dict[str, Any], root: Path) -> Path:
    """A checkpoint of the variant whose config.json has `changes`."""
    path = make(variant, root)[1]
    hf = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(hf))
    return path


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> FileOf:
    """What the config.json of a family's checkpoint says, which is made once."""
    return cache(lambda family: read(make(OF_FAMILY[family], tmp_path_factory.mktemp(family))[1]))


def theirs(path: Path) -> torch.Tensor:
    """What transformers' own choice of classes says of the prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return expected_logprobs(model.eval(), PROMPT)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"layer_types": [FULL] * 3, "sliding_window": 17}),
        ("mistral", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 17}),
        ("mistral", {"layer_types": None, "sliding_window": 9}),
        ("qwen2_moe", {"layer_types": [FULL] * 3, "sliding_window": 9, "use_sliding_window": True}),
        (
            "qwen2_moe",
            {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True},
        ),
        ("qwen2_moe", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}),
        ("phi3", {"rope_parameters": PHI3_ROPE, "original_max_position_embeddings": 40}),
        ("phi3", {"rope_scaling": PHI3_ROPE, "original_max_position_embeddings": 40}),
        ("phi3", {"rope_scaling": PHI3_ROPE, "original_max_position_embeddings": 200}),
        (
            "phi3",
            {
                "rope_scaling": PHI3_ROPE | {"type": "su", "original_max_position_embeddings": 40},
                "original_max_position_embeddings": 40,
            },
        ),
        ("phi3", {"rope_scaling": PHI3_ROPE | {"factor": 4.0}, "original_max_position_embeddings": 40}),
        ("gpt_oss", {"rope_scaling": None, "rope_parameters": {}}),
        ("gpt_oss", {"rope_scaling": {}}),
        ("llama", {"sliding_window": 4096, "max_position_embeddings": 128}),
        (
            "qwen2",
            {
                "sliding_window": 16,
                "use_sliding_window": False,
                "max_window_layers": 1,
                "layer_types": None,
            },
        ),
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("deepseek_v3", {"rope_parameters": None, "rope_scaling": LINEAR | {"mscale_all_dim": 0.7}}),
        ("deepseek_v2", {"rope_parameters": None, "rope_scaling": LINEAR | {"mscale_all_dim": 1.0}}),
        ("gemma3_text", {"original_max_position_embeddings": 40, "rope_parameters": GEMMA_ROPES}),
        ("ministral3", {"original_max_position_embeddings": 16, "rope_parameters": GROWING}),
    ],
    ids=str,
)
def test_a_field_means_what_it_means_to_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = changed(replace(OF_FAMILY[family], old=False), changes, tmp_path)
    seen = run_in_chunks(make_decoder(path, "float32", 32, ("cpu", "reference")), [PROMPT], seed=3)
    expected = theirs(path)
    for (_, position), logprobs in seen.items():
        torch.testing.assert_close(logprobs, expected[position], rtol=0, atol=1e-4)
    assert (0, len(PROMPT) - 1) in seen


BIDIRECTIONAL = "attends to both sides, and this engine computes causal attention: use a causal checkpoint"


@each_of("family", FAMILIES)
def test_attention_to_both_sides_is_refused_for_every_family(family: str, file_of: FileOf) -> None:
    hf = file_of("deepseek_v3" if family == "kimi_k2" else family) | {"model_type": family}
    assert decoder_config(hf | {"is_causal": True}) == decoder_config(hf)
    for value in (False, None, 0):  # all of which transformers takes for false
        with pytest.raises(ValueError, match=f"is_causal: {value}; such a model, .*{BIDIRECTIONAL}"):
            decoder_config(hf | {"is_causal": value})


@each_of(
    "family, changes, words",
    [
        (
            "llama",
            {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 9},
            "by its other keys: remove",
        ),
        ("mixtral", {"layer_types": [FULL] * 3, "sliding_window": 9}, "by its other keys: remove"),
        ("mistral", {"layer_types": [SLIDING] * 3, "sliding_window": None}, "layers need a sliding_window"),
        ("mistral", {"layer_types": [FULL]}, "layer_types: .*for each of 3 layers"),
        ("mistral", {"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention"),
        ("qwen2_moe", {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 9}, "need use_sliding_window"),
        ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config: .*: remove it"),
        ("gemma2", {"use_bidirectional_attention": True}, f"use_bidirectional_attention: .*{BIDIRECTIONAL}"),
        ("gemma3_text", {"use_bidirectional_attention": True}, f"attention: True; .*{BIDIRECTIONAL}"),
        ("llama", {"sliding_window": 16}, "sliding_window: 16"),
        ("glm4", {"attention_chunk_size": 16}, "attention_chunk_size: 16"),
        ("deepseek_v3", {"sliding_window": 16}, "sliding_window: 16"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave: None"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 9e3}, "rope_theta: 9000.0"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": 3, "kda_layers": [1]}},
            "full_attn_layers: 3; it must be a list of layers",
        ),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [[1]]}},
            "kda_layers: .*; it must be a list of layers",
        ),
    ],
)
def test_what_transformers_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, Any], words: str, file_of: FileOf
) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_config(file_of(family) | changes)


def test_a_familys_own_end_token_beyond_a_small_vocabulary_ends_nothing() -> None:
    """As in transformers. A file that names such a token alone is refused."""
    hf = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    hf |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
    assert decoder_config(hf | {"vocab_size": 331}).eos_token_ids == ()
    assert decoder_config(hf | {"vocab_size": 32064}).eos_token_ids == (32000,)
    with pytest.raises(ValueError, match="has eos_token_id: 32000; the vocabulary goes from 0 to 330"):
        decoder_config(hf | {"vocab_size": 331, "eos_token_id": 32000})
    assert decoder_config(hf | {"vocab_size": 331, "eos_token_id": [2, 32000]}).eos_token_ids == (2,)
