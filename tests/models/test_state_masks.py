"""Rows whose masks are slow are left out of the steps of models with states, which delays nobody else.

They get transformers' best tokens among the allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.constraints import Constraint, Mask
from continuous_batching.engine import Engine
from continuous_batching.inspection import recount
from continuous_batching.recording.format import read_entries
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Replayed, replay
from continuous_batching.request import Request, SamplingParams
from continuous_batching.samples.mask_maker import Made, MaskMaker
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from recipes.assembly.engine import BuiltEngine
from recipes.assembly.scheduler import scheduler_from
from tests.device_kinds import settings, stand_in_alone
from tests.matchers import Allowing
from tests.models.families import VOCABULARY, logprobs_behind, make, wide
from tests.models.mtp_layers import target_beside
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.test_state_mtp import DRAFTS
from tests.models.test_state_schedules import NEAR, NUM_NEW, WAYS, WIDE, built, knowing
from tests.patience import PATIENCE_S

VARIANTS = {each.name: each for each in RECURRENT_VARIANTS}
NGRAM = {"speculation.kind": "ngram", "speculation.adaptive": "fixed", "speculation.max_tokens": 3}
SWAPPED = WAYS["swapped"] | WAYS["overlapped"] | {"cache.num_pages": 22}
TOKENS = np.arange(VOCABULARY)
Case = tuple[Any, Path]


def allowed(answer: list[int]) -> np.ndarray:
    """Two of three tokens, by what came before."""
    return (TOKENS + sum(answer)) % 3 != 0


class Thirds(Allowing):
    """A matcher of such answers, which makes no mask behind a first token without leave."""

    vocabulary = VOCABULARY

    def __init__(self, leaves: threading.Semaphore | None = None) -> None:
        super().__init__()
        self._leaves = leaves

    def allowed(self) -> set[int]:
        return {*np.flatnonzero(allowed(self.tokens)).tolist()}

    def mask(self) -> Mask:
        if self._leaves is not None and self.tokens:
            assert self._leaves.acquire(timeout=PATIENCE_S), "nobody gave it leave"
        return super().mask()


class SlowConstraint(Constraint):
    """One that always counts as slow, whose masks wait for `leaves`."""

    is_slow = True

    def __init__(self) -> None:
        self.leaves = threading.Semaphore(0)
        super().__init__(lambda: Thirds(self.leaves))


class Watched(MaskMaker):
    """Asserts that no step waits for a mask that is known to be slow."""

    def __init__(self, *, waits: bool) -> None:
        super().__init__(patience_s=0.001, waits=waits)

    def take(self, rows: Index, targets: Index, slots: SlotPool, *, is_alone: bool) -> Made:
        for row in np.unique(rows[slots.constrained[rows] & (targets > slots.num_prompt[rows])]).tolist():
            constraint = slots.requests[row].constraint
            is_made = constraint.making is not None and constraint.making.is_done
            assert is_made or not constraint.is_slow, f"a step waits for the mask of row {row}"
        return super().take(rows, targets, slots, is_alone=is_alone)

    def let(self, constraint: SlowConstraint) -> None:
        """Let a mask be made that is waited for, and wait until it is."""
        job = constraint.making
        if job is None or job.is_done:
            return
        constraint.leaves.release()
        with self._made:
            assert self._made.wait_for(lambda: job.is_done, PATIENCE_S), "its thread does not come"


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.assembly.engine.MaskMaker", Watched)


@pytest.fixture(scope="module")
def case_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(VARIANTS[name], folder))


def requests(*, is_slow: bool) -> list[Request]:
    """Prompts of up to three blocks of the grid, some of which open alike; every other follows a grammar."""
    random = np.random.default_rng(5)
    opening = random.integers(0, VOCABULARY, 150).tolist()
    made = []
    for number, (shared, own) in enumerate(
        [(150, 40), (0, 100), (150, 20), (20, 1), (150, 5), (70, 61), (0, 30)]
    ):
        prompt = np.array(opening[:shared] + random.integers(0, VOCABULARY, own).tolist())
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, grammar=None if number % 2 else "[]")
        request = Request(str(number), prompt, params)
        if number % 2 == 0:
            request.constraint = SlowConstraint() if is_slow and number else Constraint(Thirds)
        made.append(request)
    return made


def check_neighbours(engine: Engine, before: dict[int, tuple[str, int]], owners: Index) -> None:
    """All free rows that could decode before a step, and were not preempted in it, have got a token."""
    for row, (name, num_tokens) in before.items():
        if engine.slots.requests[row].id == name and engine.slots.find(name) == row:
            assert row in owners or engine.slots.num_tokens[row] > num_tokens, f"{name} was held up"


def decoding(slots: SlotPool) -> dict[int, tuple[str, int]]:
    rows = slots.busy[~slots.constrained[slots.busy]]
    rows = rows[slots.decoding(rows, slots.num_computed[rows], slots.num_tokens[rows])]
    return {row: (slots.requests[row].id, int(slots.num_tokens[row])) for row in rows.tolist()}


def served(one: BuiltEngine, *, is_slow: bool) -> list[Request]:
    """Serve them; if it fails, no thread waits for leave."""
    asked = requests(is_slow=is_slow)
    slow = [each.constraint for each in asked if isinstance(each.constraint, SlowConstraint)]
    try:
        serve(one.engine, asked, slow)
    finally:
        for constraint in slow:
            constraint.leaves.release(100 * NUM_NEW)
    return asked


def serve(engine: Engine, asked: list[Request], slow: list[SlowConstraint]) -> None:
    """Two join at each step, and slow masks are let in turn, every third step."""
    waiting, masks, number = list(asked), engine.masks, 0
    assert isinstance(masks, Watched)
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        before = decoding(engine.slots) if not engine.overlap else {}
        step = engine.step()
        if step is not None:
            check_neighbours(engine, before, step.owners)
        assert not recount(engine.scheduler).wrong_pages
        number += 1
        for index, constraint in enumerate(slow):
            if number % 3 == index % 3:
                masks.let(constraint)


def check(model: Any, answered: list[Request]) -> None:
    """Each token is transformers' best of those that were allowed."""
    for request in answered:
        prompt, answer = request.prompt.tolist(), request.answer.tolist()
        assert len(answer) == NUM_NEW, f"request {request.id} ended with {request.finish_reason}"
        logprobs = logprobs_behind(model, prompt, answer)
        for at in range(NUM_NEW if request.constraint is not None else 0):
            logprobs[at, ~torch.from_numpy(allowed(answer[:at]))] = -torch.inf
        best, taken = logprobs.max(-1).values, logprobs[np.arange(NUM_NEW), answer]
        assert (best - taken).max() < NEAR, f"request {request.id}"


def check_slow(model: Any, path: Path, changes: dict[str, Any], recording: Path) -> BuiltEngine:
    """Tokens are those that transformers would allow, and a replay of the recording decides the same."""
    one = built(path, changes)
    engine = one.engine
    if changes.get("speculation.kind") == "ngram":
        assert engine.scheduler.speculation is not None
        quick = served(built(path, changes), is_slow=False)
        engine.scheduler.speculation._proposer = knowing(engine.slots, quick)
    if one.ranks is None:
        engine.observer = Recorder(one.facts, RecordingFile(recording))
    check(model, served(one, is_slow=True))
    engine.observer.close()
    counters = engine.scheduler.counters
    assert counters.late_masks > 2 * NUM_NEW
    if one.ranks is None:
        with recording.open("rb") as file:
            entries = list(read_entries(file))
        scheduler = scheduler_from(one.facts)
        steps = [each for each in replay(entries, scheduler) if isinstance(each, Replayed)]
        assert len(steps) == counters.steps
        assert scheduler.counters == counters
    return one


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_5", {}),
        pytest.param("qwen3_next", NGRAM, marks=pytest.mark.slow),
        pytest.param("kimi_linear", SWAPPED, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_quick_masks(
    name: str, changes: dict[str, Any], case_named: Callable[[str], Case], tmp_path: Path
) -> None:
    model, path = case_named(name)
    one = check_slow(model, path, changes, tmp_path / "recording")
    counters = one.engine.scheduler.counters
    assert counters.accepted_tokens or not changes.get("speculation.kind")
    assert counters.preemptions or "cache.host_gib" not in changes


@pytest.mark.slow
def test_a_layer_guesses_beside_them(tmp_path: Path) -> None:
    model, path = target_beside("qwen3_5", tmp_path)
    one = check_slow(model, path, DRAFTS, tmp_path / "recording")
    assert one.engine.scheduler.counters.accepted_tokens


@pytest.mark.slow
def test_two_ranks_leave_out_the_same_rows(case_named: Callable[[str], Case], tmp_path: Path) -> None:
    model, path = case_named("qwen3_5")
    one = check_slow(model, path, {"parallel.tensor": 2, "device.threads": 1}, tmp_path)
    assert one.ranks is not None


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_captured_steps_leave_them_out(tmp_path: Path) -> None:
    variant = wide(VARIANTS["qwen3_5"])
    model, path = make(replace(variant, options=variant.options | WIDE), tmp_path)
    npu = dict(each.split("=", 1) for each in settings("npu"))
    one = check_slow(model, path, npu | {"device.graphs": 3}, tmp_path / "recording")
    assert one.runner.graphs is not None
