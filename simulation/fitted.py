"""How long would a step take, judging by the steps of a recorded run?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.recording.format import Entry
from continuous_batching.recording.replay import Event, Replayed, replay
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool

Vector = NDArray[np.float64]
NAMES = (
    "step",
    "tokens",
    "tokens up to 8",  # a product of few rows reads weights, whatever their number
    "tokens up to 64",
    "padded tokens",  # to 8, from 64 on to 64
    "spans",
    "prompt spans",
    "sampled",
    "context of decodes",
    "context of prompts",
    "pairs of prompts",  # query and key
)
MOST_KEPT = 10_000  # of the ratios between real and modelled times of steps


def features(batch: Batch) -> Vector:
    """What a step's time may depend on, in the order of NAMES."""
    starts, stops = batch.starts, batch.stops
    lens = stops - starts
    total, spans, context = int(lens.sum()), len(lens), float(stops.sum())
    pairs = of_prompts = 0.0
    num_prompts = 0
    if total > spans:
        long = lens > 1
        num_prompts = int(np.count_nonzero(long))
        of_prompts = float(stops[long].sum())
        pairs = float((lens[long] * (starts[long] + stops[long] + 1)).sum()) / 2
    tile = 8 if total <= 64 else 64
    return np.array(
        (
            1.0,
            total,
            min(total, 8),
            min(total, 64),
            -(-total // tile) * tile,
            spans,
            num_prompts,
            len(batch.owners),
            context - of_prompts,
            of_prompts,
            pairs,
        )
    )


@dataclass(slots=True)
class Fitted:
    """A cost model: so many seconds for a unit of each feature, none negative.

    With `ratios` of real to modelled times, in the order of the recorded steps, each step takes the next of
    them, from a place that `seed` draws and round and round: a mean hides the tail, and slow steps come
    together, so that one answer may meet many.
    """

    costs_s: Vector
    ratios: Vector | None = None
    seed: int = 0
    _at: int = field(init=False)

    def __post_init__(self) -> None:
        count = 1 if self.ratios is None else len(self.ratios)
        self._at = int(np.random.default_rng(self.seed).integers(count))

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Seconds of a step."""
        mean_s = float(features(batch) @ self.costs_s)
        if self.ratios is None:
            return mean_s
        self._at = (self._at + 1) % len(self.ratios)
        return mean_s * float(self.ratios[self._at])

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        fields = {
            "costs_s": dict(zip(NAMES, self.costs_s.tolist())),
            "ratios": None if self.ratios is None else self.ratios.tolist(),
        }
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Fitted:
        """Read it; raises ValueError for a file that holds no costs."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            costs_s = np.array([float(fields["costs_s"][name]) for name in NAMES])
            ratios = None if fields["ratios"] is None else np.array(fields["ratios"], dtype=np.float64)
            return cls(costs_s, ratios)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no costs ({error}); `scripts.simulate fit` makes them") from error


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a recording: its features, and the seconds from one answer to the next, host and all."""

    features: Vector
    taken_s: float


def timed(events: Iterable[Event], scheduler: Scheduler) -> list[Timed]:
    """The steps of a replay on `scheduler`; a step that found the engine idle counts from its own start."""
    steps: list[Timed] = []
    idle_s = -np.inf
    busy = False
    for event in events:
        if isinstance(event, Replayed):
            since_s = idle_s if busy else max(event.start_s, idle_s)
            steps.append(Timed(features(event.batch), event.end_s - since_s))
            idle_s, busy = event.end_s, scheduler.has_work
    return steps


def learn(entries: Iterable[Entry], scheduler: Scheduler) -> Fitted:
    """The costs of a recording; raises ValueError if it has no step."""
    return fit(timed(replay(entries, scheduler), scheduler))


def fit(steps: Sequence[Timed]) -> Fitted:
    """By least squares of relative errors, so that short steps count as long ones do; then scaled, so that
    all steps together take what they took. Raises ValueError for no steps.
    """
    if not steps:
        raise ValueError("nothing was computed in this recording, so that nothing can be learnt from it")
    taken_s = np.array([each.taken_s for each in steps])
    seen = np.array([each.features for each in steps])
    kept = np.ones(len(steps), dtype=np.bool_)
    for _ in range(3):  # leave out steps that stalled: a page fault, another process, a compilation
        weights = 1 / taken_s[kept]
        costs_s = non_negative(seen[kept] * weights[:, None], np.ones(int(kept.sum())))
        ratios = taken_s / np.maximum(seen @ costs_s, 1e-9)
        kept = (ratios < 3 * np.median(ratios)) & (ratios > np.median(ratios) / 3)
    last = np.clip(ratios[-MOST_KEPT:], *np.quantile(ratios, (0.005, 0.995)))
    last *= taken_s.sum() / (seen @ costs_s).sum() / last.mean()
    return Fitted(costs_s, last.round(5))


def non_negative(left: Vector, right: Vector) -> Vector:
    """The x >= 0 of the least |left @ x - right|, by the active sets of Lawson and Hanson (1974)."""
    scale = np.maximum(np.abs(left).max(axis=0), 1e-300)
    matrix = left / scale
    found = np.zeros(matrix.shape[1])
    active = np.zeros(len(found), dtype=np.bool_)
    for _ in range(10 * len(found)):
        gain = matrix.T @ (right - matrix @ found)
        gain[active] = 0
        if gain.max() <= 1e-9 * np.abs(matrix.T @ right).max():
            break
        active[int(gain.argmax())] = True
        while True:
            trial = np.zeros(len(found))
            trial[active] = np.linalg.lstsq(matrix[:, active], right, rcond=None)[0]
            wrong = active & (trial <= 0)
            if not wrong.any():
                found = trial
                break
            steps = found[wrong] / (found[wrong] - trial[wrong])
            found = found + float(steps.min()) * (trial - found)
            active &= found > 1e-12
            found[~active] = 0
    result: Vector = found / scale
    return result
