"""A checkpoint's multi-token-prediction layer makes the published guesses and changes no token.

As test_eagle3 does for heads, the tests run in float32, over chunked prompts, shared prefixes, samples that
fork, preemption with and without swapping, compaction and a pool that changes its size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.engine import Engine
from models.drafting.mtp import Mtp
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.assembly.families import draft_config, share_of
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.sizing import plan_memory
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import SpeculationSection
from tests.device_kinds import Kind, section, stand_in_alone
from tests.models.eagle3_heads import check_head_drafts
from tests.models.families import followed
from tests.models.mtp_layers import NUM_LAYERS, target_of
from tests.models.test_draft_model import Watched, serve, settings_of, tokens_of
from tests.models.test_eagle3 import OVERLAP, ROOMY, SMALL_PAGES
from tests.models.test_joined_heads import PROMPTS, steps_of
from tests.models.test_latent_prolog import PROLOG, SMALLEST, say_that_it_gains

NUM_SERVED = 7  # requests, of which some fork


def asked_of(target: Path, kind: Kind, most: int = 0, **more: Any) -> list[str]:
    keys = {"speculation.kind": "mtp", "speculation.max_tokens": most, "speculation.adaptive": "fixed"}
    return settings_of(target, kind, None, most, **(keys if most else {}), **more)


def engine_of(target: Path, kind: Kind, most: int = 0, **more: Any) -> Engine:
    return build(load(ROOT / "recipes/any/cpu.yaml", asked_of(target, kind, most, **more))).engine


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        pytest.param("deepseek_v3", 4, SMALL_PAGES, marks=pytest.mark.slow),
        ("glm4_moe", 20, OVERLAP),  # more than a page of 16
        pytest.param("glm_5_shared", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_a_layer_changes_no_token_and_says_what_the_published_one_does(
    name: str, most: int, more: dict[str, Any], tmp_path: Path
) -> None:
    model, path = target_of(name, tmp_path)
    plain = tokens_of(serve(engine_of(path, "cpu", **more)))
    engine = engine_of(path, "cpu", most, **more)
    watched = Watched(engine)
    drafted = tokens_of(serve(engine))
    assert drafted == plain
    counters = engine.scheduler.counters
    assert min(counters.preemptions, counters.swapped_in_pages, counters.hit_tokens) > 0
    num_made, num_right = check_head_drafts(model.further, watched.drafts, drafted)
    assert num_made > 0.9 * counters.draft_tokens > 10
    assert num_right >= counters.accepted_tokens > 0.02 * counters.draft_tokens
    assert num_right < num_made


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_the_layer_and_say_what_one_says(tmp_path: Path) -> None:
    """Stages have the tokens of transformers in test_rank_identity.py."""
    model, path = target_of("deepseek_v3", tmp_path, moe_intermediate_size=32)
    plain = tokens_of(serve(engine_of(path, "cpu"), most=NUM_SERVED))
    two: dict[str, Any] = {"parallel.tensor": 2, "parallel.expert": 2}
    two["scheduler.overlap"] = "true"  # which is how a watched runner starts steps
    built = build(load(ROOT / "recipes/any/cpu.yaml", asked_of(path, "cpu", 3, **two)))
    assert built.ranks is not None
    watched = Watched(built.engine)
    drafted = tokens_of(serve(built.engine, most=NUM_SERVED))
    built.engine.observer.close()
    assert drafted == plain
    num_made, num_right = check_head_drafts(model.further, watched.drafts, drafted)
    assert num_made > 100
    assert num_right > 10


@pytest.mark.slow
@pytest.mark.npu
@stand_in_alone
def test_captured_steps_make_the_published_guesses(tmp_path: Path) -> None:
    model, path = target_of("deepseek_v3", tmp_path, is_wide=True)
    plain = tokens_of(serve(engine_of(path, "npu", **ROOMY), most=NUM_SERVED))
    engine = engine_of(path, "npu", 3, **ROOMY, **{"device.graphs": 24})
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.drafter is not None
    assert engine.runner.drafter.graphs is not None
    watched = Watched(engine)
    drafted = tokens_of(serve(engine, most=NUM_SERVED))
    assert drafted == plain
    assert engine.scheduler.counters.accepted_tokens > 10
    model.further.reads_zeros = True  # a key before the first, by the operator for latents
    num_made, _ = check_head_drafts(model.further, watched.drafts, plain)
    assert num_made > 100


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    _, path = target_of("glm4_moe", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(RecipeError, match="has no layer that predicts further tokens; take another kind"):
        engine_of(path, "cpu", 3)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with pytest.raises(RecipeError, match="rope is dynamic, by which its prediction layer cannot keep"):
        engine_of(path, "cpu", 3)
    quantize(path, tmp_path / "int8")  # which serves without drafts
    with pytest.raises(RecipeError, match="is read from the model's checkpoint, and its weights are random"):
        engine_of(path, "cpu", 3, **{"model.weights": "random"})


def test_a_layer_that_is_not_whole_is_named(tmp_path: Path) -> None:
    _, path = target_of("glm4_moe", tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"its layer: .*: missing: model.layers.3.hnorm.weight \[48\]"):
        engine_of(path, "cpu", 3)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_what_is_planned_is_what_the_layer_has(name: str, tmp_path: Path) -> None:
    _, path = target_of(name, tmp_path)
    recipe = load(ROOT / "recipes/any/cpu.yaml", asked_of(path, "cpu", 3))
    config, _ = share_of(recipe, 0)
    layer = draft_config(recipe, config)
    assert layer is not None
    built = build(recipe)
    assert isinstance(built.runner.drafter.decoder, Mtp)
    prefix = layer.prefix
    stored = load_file(path / "model.safetensors").items()
    of_layer = sum(
        tensor.numel() * 4
        for each, tensor in stored
        if each.startswith(prefix) and not each.startswith((f"{prefix}embed", f"{prefix}shared_head.head"))
    )
    assert layer.weight_bytes == of_layer
    plain = replace(recipe, speculation=SpeculationSection())
    plans = [plan_memory(each, config, 2**32) for each in (plain, recipe)]
    assert plans[1].weight_bytes - plans[0].weight_bytes == of_layer, "the head is the model's"


@pytest.mark.slow
def test_a_layer_in_int8_guesses_and_changes_no_token(tmp_path: Path) -> None:
    _, path = target_of("deepseek_v3", tmp_path)
    quantize(path, tmp_path / "int8")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert stored["model.layers.3.mlp.experts.0.down_proj.weight"].dtype == torch.int8
    plain = tokens_of(serve(engine_of(tmp_path / "int8", "cpu"), most=4))
    engine = engine_of(tmp_path / "int8", "cpu", 3)
    assert tokens_of(serve(engine, most=4)) == plain
    assert engine.scheduler.counters.accepted_tokens > 10


MOST, NUM_NEW = 3, 16  # guesses of a row and step; tokens of an answer
SHORT = PROMPTS[:3]


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_a_joined_layer_makes_the_published_guesses_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pre-attention work is one launch, as in the target's layers, of the smallest model that
    npu_mla_prolog_v3 takes; in captured steps, held to DeepSeek-V3's formulas.
    """
    options = {name: value for name, value in SMALLEST.items() if name != "num_hidden_layers"}
    model, path = target_of("deepseek_v3", tmp_path, is_wide=True, **options)
    model.further.reads_zeros = True  # the operator leaves no key out
    say_that_it_gains(tmp_path, monkeypatch)
    engine = engine_of(path, "npu", MOST, **ROOMY, **{"device.graphs": 16})
    runner, machine = engine.runner, start(section("npu"))
    assert isinstance(machine, Npu)
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    assert runner.drafter.graphs is not None
    assert isinstance(runner.drafter.decoder, Mtp)
    assert runner.drafter.decoder.layer.attention.joins
    watched = Watched(engine)
    answers, steps = steps_of(engine, machine.launch_log, SHORT, NUM_NEW)
    assert answers == [followed(model, *each, NUM_NEW)[0] for each in zip(SHORT, answers)]
    # Each layer of the target, and the layer behind them for each guess
    assert max(step[PROLOG] for step in steps) == NUM_LAYERS + MOST
    tokens = {str(at): prompt + answer for at, (prompt, answer) in enumerate(zip(SHORT, answers))}
    num_made, num_right = check_head_drafts(model.further, watched.drafts, tokens)
    assert num_made > 30
    assert num_right > 10
