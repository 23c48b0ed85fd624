"""An EAGLE-3 head makes the published head's drafts wherever a row is moved, and changes no token.

The engine runs in float32, over chunked prompts, shared prefixes, samples that fork, preemption with and
without swapping, compaction and a pool that changes its size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.request import Request
from continuous_batching.speculation.lengths import Fixed, Offers
from kv_cache.pages import Index
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, stand_in_alone
from tests.models.eagle3_heads import Published, check_head_drafts, head_for, target_of
from tests.models.families import Variant, wide
from tests.models.test_draft_model import Watched, serve, settings_of, tokens_of
from tests.models.variants import LLAMA3
from tests.thorough import cases

LLAMA = Variant("llama_target", "llama", {"num_key_value_heads": 2}, LLAMA3)
NUM_SERVED = 7  # requests, of which some fork
QWEN3 = Variant("qwen3_target", "qwen3", {"head_dim": 16})
OTHERWISE = {"owns_embedding": True, "head_dim": 20, "norm_before_residual": True, "sharpness": 0.3}
OVERLAP = {"scheduler.overlap": "true"}
SMALL_PAGES = {"cache.page_size": 8, "cache.num_pages": 28}
ROOMY = {"cache.num_pages": 60, "scheduler.max_batch_tokens": 64}


def engine_of(target: Path, kind: Kind, head: Path | None = None, most: int = 4, **more: Any) -> Engine:
    keys = {f"speculation.{name}": value for name, value in (("kind", "eagle3"), ("draft_path", head))}
    keys |= {"speculation.max_tokens": most, "speculation.adaptive": "fixed"}
    asked = settings_of(target, kind, None, most, **(keys if head else {}), **more)
    return build(load(ROOT / "recipes/any/cpu.yaml", asked)).engine


def check(
    target: Path, head: Path, model: Any, kind: Kind, most: int, plain: list[Request], **more: Any
) -> float:
    engine = engine_of(target, kind, head, most, **more)
    watched = Watched(engine)
    drafted = serve(engine)
    assert tokens_of(drafted) == tokens_of(plain)
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.swapped_in_pages > 0
    assert counters.hit_tokens > 0
    num_made, num_right = check_head_drafts(Published(model, head), watched.drafts, tokens_of(drafted))
    assert num_made > 0.9 * counters.draft_tokens > 10
    assert num_right >= counters.accepted_tokens
    return counters.accepted_tokens / counters.draft_tokens


@pytest.mark.parametrize(
    ("variant", "most", "form", "more"),
    [
        (LLAMA, 4, {"draft_vocab": 120}, {}),
        pytest.param(
            QWEN3, 9, OTHERWISE, SMALL_PAGES | OVERLAP, marks=pytest.mark.slow
        ),  # more than a page of 8
    ],
    ids=["small vocabulary", "many"],
)
def test_a_head_changes_no_token_and_says_what_the_published_one_does(
    variant: Variant, most: int, form: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    model, path = target_of(variant, tmp_path)
    plain = serve(engine_of(path, "cpu", **more))
    head = head_for(model, tmp_path / "head", **form)
    share = check(path, head, model, "cpu", most, plain, **more)
    assert share > (0 if "sharpness" in form else 0.02)


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_captured_steps_make_the_published_drafts(tmp_path: Path) -> None:
    model, path = target_of(wide(LLAMA), tmp_path)
    head = head_for(model, tmp_path / "head", head_dim=64)
    few = ROOMY | {"scheduler.num_slots": 4}
    plain = tokens_of(serve(engine_of(path, "npu", **few), most=NUM_SERVED))
    engine = engine_of(path, "npu", head, 3, **few, **{"device.graphs": 16})
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.drafter is not None
    assert engine.runner.drafter.graphs is not None
    watched = Watched(engine)
    assert tokens_of(serve(engine, most=NUM_SERVED)) == plain
    num_made, num_right = check_head_drafts(Published(model, head), watched.drafts, plain)
    assert num_made > 100
    assert num_right > 10


class Pausing(Fixed):
    """Gives rows drafts in some steps, and none in between, for longer than a head may fall behind."""

    def __init__(self) -> None:
        self._num_steps = 0

    @property
    def is_hopeful(self) -> bool:
        return self._num_steps % 13 < 4

    def choose(self, offers: Offers) -> Index:
        return offers.counts if self.is_hopeful else np.zeros_like(offers.counts)

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        self._num_steps += 1


@pytest.mark.slow
@pytest.mark.parametrize(("most", "overlap"), cases([(3, True)], [*product((1, 3), (False, True))]))
def test_a_head_catches_up_while_there_are_no_drafts(most: int, overlap: bool, tmp_path: Path) -> None:
    model, path = target_of(LLAMA, tmp_path)
    head = head_for(model, tmp_path / "head")
    more = {"scheduler.overlap": str(overlap).lower()}
    plain = tokens_of(serve(engine_of(path, "cpu", **more)))
    engine = engine_of(path, "cpu", head, most, **more)
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.lengths = Pausing()
    watched = Watched(engine)
    drafted = tokens_of(serve(engine))
    assert drafted == plain
    num_made, _ = check_head_drafts(Published(model, head), watched.drafts, drafted)
    assert num_made > 40


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "contexts", "stages", "owns"),
    cases(
        [(2, 1, 1, False), (1, 1, 2, False)],
        [(2, 1, 1, False), (2, 2, 1, False), (1, 1, 2, True), (1, 1, 3, False), (2, 1, 2, False)],
    ),
)
def test_ranks_share_a_head_and_say_what_one_says(
    tensors: int, contexts: int, stages: int, owns: bool, tmp_path: Path
) -> None:
    """With a draft vocabulary that two ranks do not divide evenly, and pages that they divide or not; of two
    stages, each has some of the layers whose inputs the head reads.
    """
    model, path = target_of(replace(LLAMA, options={"num_key_value_heads": 2 // contexts}), tmp_path)
    head = head_for(model, tmp_path / "head", draft_vocab=121, owns_embedding=owns)
    plain = serve(engine_of(path, "cpu"))
    two = {"parallel.tensor": tensors, "parallel.context": contexts, "parallel.pipeline": stages}
    # A watched runner starts steps, as overlap does; divided rows are those of prompts
    more = {"device.attention": "reference", "scheduler.overlap": "true", "parallel.least_divided_tokens": 16}
    engine = engine_of(path, "cpu", head, 4, **two, **more)
    watched = Watched(engine)
    drafted = tokens_of(serve(engine))
    engine.observer.close()
    assert drafted == tokens_of(plain)
    num_made, num_right = check_head_drafts(Published(model, head), watched.drafts, drafted)
    assert num_made > 0.9 * engine.scheduler.counters.draft_tokens > 10
    assert num_right >= engine.scheduler.counters.accepted_tokens > 0
