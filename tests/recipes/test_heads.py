"""A recipe may name a head for its model, whose weights and features the plan counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.speculation.proposer import head_spans
from models.drafting.drafter import HeadDrafter
from recipes.assembly.engine import build
from recipes.assembly.memory_plan import report
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import settings
from tests.models.eagle3_heads import HIDDEN, head_for, target_of
from tests.models.families import VOCABULARY, Variant

TARGET = Variant("llama_target", "llama")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    model, target = target_of(TARGET, root)
    return target, head_for(model, root / "head", draft_vocab=100)


def recipe_of(target: Path, head: Path | None, *more: str) -> Recipe:
    asked = [f"model.path={target}", "model.dtype=float32", "cache.memory_gib=null", "cache.num_pages=40"]
    asked += [
        "scheduler.num_slots=4",
        "scheduler.max_batch_tokens=32",
        "cache.page_size=16",
        *settings("cpu"),
    ]
    if head is not None:
        asked += ["speculation.kind=eagle3", f"speculation.draft_path={head}"]
    return load(ROOT / "recipes/any/cpu.yaml", [*asked, *more])


def changed(
    pair: tuple[Path, Path], made: Path, config: dict[str, Any], **tensors: torch.Tensor | None
) -> Path:
    """The head with other values in its configuration, and other tensors, or without them."""
    made.mkdir()
    hf = json.loads((pair[1] / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(hf | config))
    kept = load_file(pair[1] / "model.safetensors") | {
        name.replace("__", "."): each for name, each in tensors.items()
    }
    save_file({name: each for name, each in kept.items() if each is not None}, made / "model.safetensors")
    return made


def test_the_plan_counts_the_head_and_its_features(pair: tuple[Path, Path]) -> None:
    plain, recipe = build(recipe_of(pair[0], None)), recipe_of(pair[0], pair[1])
    drafted = build(recipe)
    drafter = drafted.runner.drafter
    assert isinstance(drafter, HeadDrafter)
    *of_layers, (features,) = drafted.runner.cache.planes
    assert of_layers[-1] is drafter.cache.of(0)
    assert features.shape == (40, 2 + recipe.speculation.max_tokens, HIDDEN)
    held = [sum(each.nbytes for each in tensors) for tensors in (*of_layers, (features,))]
    assert sum(held) == drafted.memory.cache_bytes
    assert sum(held[:-2]) == plain.memory.cache_bytes
    weights = sum(each.numel() * 4 for each in load_file(pair[1] / "model.safetensors").values() if each.ndim)
    of_maps = 4 * (100 + VOCABULARY)
    assert drafter.decoder.config.weight_bytes == weights - of_maps
    assert drafted.memory.weight_bytes - plain.memory.weight_bytes >= weights - of_maps
    lines = dict(report(recipe, drafted.config, drafted.memory))
    assert lines["head"].startswith("eagle3, 0.0 M parameters, float32")
    again = scheduler_from(drafted.facts).speculation
    assert again is not None
    assert again.spans is head_spans


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"hidden_size": 64}, {}, "has hidden_size: 64; it must be 48, as the model has"),
        ({"vocab_size": 161}, {}, "has vocab_size: 161; it must be 160, as the model has"),
        ({"draft_vocab_size": 161}, {}, "draft_vocab_size: 161; the model's vocabulary has 160"),
        ({"num_hidden_layers": 2}, {}, "has num_hidden_layers: 2; it must be 1, heads have one layer"),
        ({"attention_bias": True}, {}, "has attention_bias: True; it must be False, heads have no biases"),
        ({"model_type": "mamba"}, {}, "has model_type: 'mamba'; supported are heads of a llama layer"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
            {},
            "has eagle_aux_hidden_state_layer_ids: [1, 3, 5]; it must be [2, 3, 4]",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "has dynamic rope, by which no keys"),
        ({}, {"fc__weight": None}, "missing: fc.weight [48, 144]"),
        ({}, {"d2t": torch.arange(100) + 61}, "d2t in"),
        ({}, {"d2t": torch.zeros(100)}, "wrongly typed: d2t is F32, not one of I64"),
        ({}, {"midlayer__extra": torch.zeros(1)}, "surplus: midlayer.extra has no place in this model"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    config: dict[str, Any], tensors: dict[str, Any], message: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    head = changed(pair, tmp_path / "other", config, **tensors)
    with pytest.raises(RecipeError) as refused:
        build(recipe_of(pair[0], head))
    said = str(refused.value)
    assert message in said
    assert "speculation.draft_path: the head: " in said
    assert "\n" not in said or "the weights in" in said  # which lists what is wrong with them


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["speculation.draft_dtype=bfloat16"], "read only where speculation.kind is draft, and it is eagle3"),
        (["speculation.draft_path=null"], "required where speculation.kind is eagle3; name the directory of"),
        (["speculation.draft_path=recipes/tiny/nowhere"], "config.json does not exist"),
        (["speculation.draft_path=recipes/tiny/draft"], "has num_hidden_layers: 2; it must be 1"),
    ],
)
def test_what_a_head_cannot_is_refused_in_one_line(
    more: list[str], message: str, pair: tuple[Path, Path]
) -> None:
    with pytest.raises(RecipeError) as refused:
        build(recipe_of(*pair, *more))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_of_few_layers_has_no_head(pair: tuple[Path, Path]) -> None:
    with pytest.raises(RecipeError, match="the model has 4 layers, and an EAGLE-3 head is for one of 7"):
        build(load("recipes/tiny/cpu.yaml", ["speculation.kind=eagle3", f"speculation.draft_path={pair[1]}"]))


def test_requests_may_be_longer_than_the_heads_positions(pair: tuple[Path, Path]) -> None:
    assert json.loads((pair[1] / "config.json").read_text())["max_position_embeddings"] == 32
    assert build(recipe_of(*pair)).memory.longest_tokens > 400


def test_requests_may_be_as_long_as_a_stretched_model_reaches(pair: tuple[Path, Path]) -> None:
    most = json.loads((pair[0] / "config.json").read_text())["max_position_embeddings"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": most}
    stretched = f"model.config_overrides.rope_scaling={json.dumps(yarn)}"
    sizes = [f"scheduler.max_request_tokens={3 * most}", f"cache.num_pages={1 + 3 * most // 16}"]
    assert build(recipe_of(*pair, stretched, *sizes)).memory.longest_tokens == 3 * most
