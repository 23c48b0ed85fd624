"""Every absurd value in a config.json is refused in one line, before anything is built from it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.layers.rope import Rope
from models.quantization import Quantization
from recipes.assembly.families import FAMILIES, decoder_config, model_config, read
from recipes.assembly.memory_plan import GIB
from recipes.assembly.scoring import score
from recipes.assembly.sizing import plan_memory
from recipes.schema.recipe import CacheSection, DeviceSection, ModelSection, Recipe
from recipes.schema.scheduler_section import SchedulerSection
from tests.peak_memory import forget_peak, peak_bytes
from tests.thorough import cases, first_quick

APART = ("llama", "deepseek_v3", "gpt_oss", "qwen3_next")  # families that differ most
BASE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
    "dtype": None, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "eos_token_id": 2, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1,
    "layer_types": None, "num_experts": 8, "num_local_experts": None, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True,
    "partial_rotary_factor": 1.0, "original_max_position_embeddings": None, "quantization_config": None,
    "compression_config": None, "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
     "beta_slow": 1.0, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4,
     "truncate": True},
]  # fmt: skip
ABSURD = [0, -1, 1, 3, 10**9, 2**63, 10**400, 1e300, 0.5, math.nan, math.inf, True, "12", "", [], {}, None]
ABSURD += [[1, 2], [[]], [None], {"a": 1}, {"a": {}}, "x" * 100_000, [0] * 100_000]


def configs(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """One key after the other, with each absurd value; what all families share, for one of them.

    Without --thorough each other family has a sixth of the values of a key, and another sixth of the next.
    """
    base = BASE | {"model_type": family}
    step = 1 if family == "llama" else cases(6, 1)
    for index, key in enumerate(base):
        for value in ABSURD[(index + len(family)) % step :: step]:
            yield key, base | {key: value}
    for rope in ROPES if family == "llama" else ():
        for key in rope:
            for value in ABSURD:
                yield f"rope.{key}", base | {"rope_scaling": rope | {key: value}}
    for key in ("quant_method", "format", "config_groups", "ignore") if family == "llama" else ():
        for value in ABSURD:
            yield f"quantization.{key}", base | {"quantization_config": {"quant_method": value, key: value}}


def recipe_of(config: dict[str, Any]) -> Recipe:
    return Recipe(
        model=ModelSection(config=config, weights="random"),
        device=DeviceSection(kind="cpu"),
        cache=CacheSection(page_size=16, num_pages=64),
        scheduler=SchedulerSection(num_slots=4, max_batch_tokens=64),
    )


@pytest.mark.parametrize("family", first_quick(2, [*APART, *sorted(FAMILIES.keys() - {*APART})]))
def test_every_key_with_every_absurd_value_is_refused_or_works(family: str) -> None:
    lines: dict[str, str] = {}
    for number, (key, hf) in enumerate(configs(family)):
        began_s, before = time.process_time(), forget_peak()
        try:
            decoder_config(hf)  # most are refused here, and to make a recipe takes longer
            recipe = recipe_of(hf)
            config = model_config(recipe)
            plan_memory(recipe, config, 2 * GIB, host_memory=2 * GIB)
        except ValueError as error:
            lines[f"{key} {number}"] = str(error)
        else:
            rope = Rope(config.rope)
            assert torch.isfinite(rope.frequencies).all(), f"{key}: {hf}"
            assert bool(rope.factors.isfinite().all()), f"{key}: {hf}"
        grown = peak_bytes() - before
        assert grown < 500 << 20, f"{key} took {grown:,} bytes"
        assert time.process_time() - began_s < 5, key
    assert len(lines) > number // 3
    assert not [key for key, line in lines.items() if "\n" in line or len(line) > 600]


@pytest.mark.parametrize("pattern", ["re:(", "re:" + "(" * 5000, "re:a{99999999999}", "re:[", "re:*"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    said = Quantization().in_json() | {"ignore": [pattern]}
    with pytest.raises(ValueError, match=r"quantization_config\.ignore: .* is no regular expression"):
        model_config(recipe_of(BASE | {"model_type": "llama", "quantization_config": said}))


def test_a_billion_layers_are_refused_by_their_number() -> None:
    hf = BASE | {"model_type": "llama", "num_hidden_layers": 10**9}
    with pytest.raises(
        ValueError, match=r"num_hidden_layers: 1000000000; it must be an integer from 1 to 4096"
    ):
        model_config(recipe_of(hf))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not JSON"),
        ("\x00", "not JSON"),
        ("", "not JSON"),
        ("[]", "no JSON object"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "llama"}))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=problem) as refusal:
        read(tmp_path)
    assert str(tmp_path / name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_that_is_too_large_is_not_scored(tmp_path: Path) -> None:
    huge = {"vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**20, "head_dim": 2**10}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "llama"} | huge))
    with pytest.raises(ValueError, match="more than this machine has; score a smaller model"):
        score(tmp_path, [[1, 2, 3]])
