"""The layer beside a Qwen3-Next's or Qwen3.5's own that predicts further tokens makes the published guesses.

It changes no token of a model whose layers keep states, in float32: over prompts in chunks, kept states that
are found again, samples that fork, preemption with and without swapping, and ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.drafting.mtp import Mtp
from recipes.assembly.families import draft_config, share_of
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import settings, stand_in_alone
from tests.models.eagle3_heads import check_head_drafts
from tests.models.families import wide
from tests.models.mtp_layers import target_beside
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.test_draft_model import Watched
from tests.models.test_state_schedules import NUM_SLOTS, WAYS, WIDE, built, check, requests, served

DRAFTS = {"speculation.kind": "mtp", "speculation.adaptive": "fixed", "speculation.max_tokens": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_5", WAYS["swapped"]),
        ("qwen3_5_moe", WAYS["overlapped"] | {"speculation.max_tokens": 7}),
    ],
)
def test_a_layer_changes_no_token_and_says_what_the_published_one_does(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, path = target_beside(name, tmp_path)
    engine = built(path, DRAFTS | changes).engine
    watched = Watched(engine)
    answered = served(engine)
    check(model, answered)
    counters = engine.scheduler.counters
    assert counters.hit_tokens > 0
    tokens = {each.id: each.tokens.tolist() for each in answered}
    num_made, num_right = check_head_drafts(model.further, watched.drafts, tokens)
    assert num_made > 0.9 * counters.draft_tokens > 10
    assert num_right >= counters.accepted_tokens > 0.1 * counters.draft_tokens
    assert num_right < num_made


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_the_layer_and_say_what_one_says(tmp_path: Path) -> None:
    model, path = target_beside("qwen3_next", tmp_path)
    two = {"parallel.tensor": 2, "parallel.expert": 2, "device.threads": 1}
    one = built(path, DRAFTS | WAYS["overlapped"] | two)
    assert one.ranks is not None
    watched = Watched(one.engine)
    answered = served(one.engine, requests()[:6])
    one.engine.observer.close()
    check(model, answered)
    tokens = {each.id: each.tokens.tolist() for each in answered}
    num_made, num_right = check_head_drafts(model.further, watched.drafts, tokens)
    assert num_made > 100
    assert num_right > 10


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_what_is_planned_is_what_the_layer_has(name: str, tmp_path: Path) -> None:
    """One that lacks a tensor is named, and one of a checkpoint that has none is not loaded."""
    _, path = target_beside(name, tmp_path)
    one = built(path, DRAFTS)
    recipe = load(ROOT / "recipes/any/cpu.yaml", [f"model.path={path}", "speculation.kind=mtp"])
    config = draft_config(recipe, share_of(recipe, 0)[0])
    assert config is not None
    assert isinstance(one.runner.drafter.decoder, Mtp)
    stored = load_file(path / "model.safetensors")
    sizes = {each: tensor.numel() * 4 for each, tensor in stored.items() if each.startswith("mtp.")}
    assert config.weight_bytes == sum(sizes.values())
    del stored["mtp.pre_fc_norm_hidden.weight"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"its layer: .*: missing: mtp.pre_fc_norm_hidden.weight \[48\]"):
        built(path, DRAFTS)
    said = (path / "config.json").read_text()
    field = "num_nextn_predict_layers" if name == "qwen3_next" else "mtp_num_hidden_layers"
    (path / "config.json").write_text(said.replace("{", f'{{"{field}": 0,', 1))
    with pytest.raises(RecipeError, match="is 0, so its checkpoint has no layer that predicts"):
        built(path, DRAFTS)


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_captured_steps_check_the_drafts_of_rows_with_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stand-in for an NPU. Rows read accepted drafts again, and no draft changes their state."""
    monkeypatch.setattr("models.step.graphs.ALIGNED", 1)  # so that nothing lies between drafts and inputs
    variant = wide(next(each for each in RECURRENT_VARIANTS if each.name == "qwen3_5"))
    model, path = target_beside("qwen3_5", tmp_path, replace(variant, options=variant.options | WIDE))
    npu = dict(each.split("=", 1) for each in settings("npu"))
    one = built(path, npu | DRAFTS | {"device.graphs": NUM_SLOTS * 4})
    graphs = one.runner.graphs
    assert graphs is not None
    assert (graphs.sizes[-1], graphs.span_rows) == (NUM_SLOTS, [1, 2, NUM_SLOTS])
    taken = []
    takes = graphs.takes
    graphs.takes = lambda batch: taken.append((takes(batch), batch.num_drafts)) or taken[-1][0]
    watched = Watched(one.engine)
    answered = served(one.engine, requests()[:6])
    check(model, answered)
    with_drafts = [is_taken for is_taken, num_drafts in taken if num_drafts]
    assert sum(with_drafts) > len(with_drafts) / 2, "drafts beside decodes alone are captured"
    counters = one.engine.scheduler.counters
    assert counters.accepted_tokens > 10
    tokens = {each.id: each.tokens.tolist() for each in answered}
    num_made, _ = check_head_drafts(model.further, watched.drafts, tokens)
    assert num_made > 0.9 * counters.draft_tokens
