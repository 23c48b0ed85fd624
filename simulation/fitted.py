"""Fit the time of a step to the steps of a recorded run, and predict it.

The model is linear in the features of a batch (tokens, spans, context, pairs) with costs that are not
negative, times ratios drawn from the recording (`spread`). Whether it can be trusted is judged in
`fit_trust`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.recording.format import Entry
from continuous_batching.recording.replay import Event, Replayed, replay
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from simulation.fit_trust import FitTrust, trust
from simulation.spread import Spread, loads, spread

Vector = NDArray[np.float64]
NAMES = (
    "step",
    "tokens",
    "tokens up to 8",  # a product of few rows reads the weights, whatever their number
    "tokens up to 64",
    "padded tokens",  # padded to a multiple of 8, or of 64 above 64
    "spans",
    "prompt spans",
    "sampled",
    "context of decodes",
    "context of prompts",
    "pairs of prompts",  # pairs of query and key
)
MOST_KEPT = 10_000  # steps whose ratios of real to modelled time are kept
BEYOND = 1.1  # ratio to the largest recorded feature above which a step is an extrapolation


def features(batch: Batch) -> Vector:
    """Return what the time of a step may depend on, in the order of NAMES."""
    starts, stops = batch.starts, batch.stops
    lens = stops - starts
    total, spans, context = int(lens.sum()), len(lens), float(stops.sum())
    pairs = of_prompts = 0.0
    num_prompts = 0
    if total > spans + batch.num_drafts:
        long = lens - batch.drafts_by_span > 1 if batch.num_drafts else lens > 1
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
    """A cost model with a non-negative number of seconds for a unit of each feature.

    Each simulated step follows the next of the recorded steps in `spread`, cyclically from one that `seed`
    draws.
    """

    costs_s: Vector
    largest: Vector  # largest recorded value of each feature; predictions beyond it are extrapolations
    spread: Spread
    trust: FitTrust
    seed: int = 0
    _at: int = field(init=False)
    _num_steps: int = field(init=False, default=0)
    _num_beyond: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._at = int(np.random.default_rng(self.seed).integers(len(self.spread.ranks)))

    def rewound(self) -> Fitted:
        """Rewind to the first recorded step.

        Engines that were recorded together, and are simulated together, are then slow together as they were:
        a step of one follows the steps of the others at the same time.
        """
        self._at = -1
        return self

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of a step."""
        of_step = features(batch)
        mean_s = float(of_step @ self.costs_s)
        self._num_steps += 1
        self._num_beyond += bool((of_step > BEYOND * self.largest).any())
        self._at = (self._at + 1) % len(self.spread.ranks)
        return mean_s * self.spread.ratio(mean_s, self._at)

    def describe(self) -> dict[str, Any]:
        """Describe whether the simulation so far can be trusted, as JSON data with the doubts in words."""
        return self.trust.describe(self._num_beyond / max(1, self._num_steps))

    def in_json(self) -> str:
        """Return the model as the text of a file."""
        fields = {
            "costs_s": dict(zip(NAMES, self.costs_s.tolist())),
            "largest": dict(zip(NAMES, self.largest.tolist())),
            "sizes": {
                "up_to_s": self.spread.up_to_s.tolist(),
                "ratios": [each.tolist() for each in self.spread.ratios],
                "ranks": self.spread.ranks.tolist(),
                "loads": self.spread.loads.tolist(),
            },
            "trust": asdict(self.trust),
        }
        return json.dumps({**fields, "crc32": _check(fields)}) + "\n"

    @classmethod
    def from_json(cls, data: bytes, name: object) -> Fitted:
        """Read the model from the bytes of a file, which an error calls `name`.

        Raises ValueError for a file that holds no costs, or that was changed after it was written.
        """
        try:
            fields = json.loads(data.decode("utf-8"))
            if fields.pop("crc32") != _check(fields):
                raise ValueError("it was changed since it was written")
            sizes = fields["sizes"]
            kept = Spread(
                _vector(sizes["up_to_s"]),
                tuple(map(_vector, sizes["ratios"])),
                _vector(sizes["ranks"]),
                _vector(sizes["loads"]),
            )
            if len(kept.ratios) != len(kept.up_to_s) + 1 or not all(map(len, [*kept.ratios, kept.ranks])):
                raise ValueError("its sizes have no ratios")
            if kept.ranks.max() >= 1:
                raise ValueError("a rank is not below 1")
            if len(kept.loads) != len(kept.ranks):
                raise ValueError("its steps have not all a load")
            if not all(type(each) in (int, float) for each in fields["trust"].values()):
                raise ValueError("its trust is not all numbers")
            return cls(
                _vector([fields["costs_s"][name] for name in NAMES]),
                _vector([fields["largest"][name] for name in NAMES]),
                kept,
                FitTrust(**fields["trust"]),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError(f"{name} holds no costs ({error}); `scripts.simulate fit` makes them") from error


def _vector(values: Any) -> Vector:
    """Return numbers of a file as a vector; raises ValueError unless all are finite and not negative."""
    found = np.array(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("a list is not all of finite numbers that are not negative")
    return found


def _check(fields: dict[str, Any]) -> int:
    """Return a checksum of a file's content that does not depend on its layout."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a recording: its features, and the seconds between answers, the host's included."""

    features: Vector
    taken_s: float


def timed(events: Iterable[Event], scheduler: Scheduler) -> list[Timed]:
    """Return the steps of a replay on `scheduler`.

    A step that found the engine idle counts from its own start.
    """
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
    """Fit the costs of a recording; raises ValueError if it has no step."""
    return fit(timed(replay(entries, scheduler), scheduler))


def fit(steps: Sequence[Timed]) -> Fitted:
    """Fit costs by least squares of relative errors, so that short steps count as much as long ones.

    The spread holds what the fit leaves unexplained. Raises ValueError for no steps, and for a step that took
    no time.
    """
    if not steps:
        raise ValueError("nothing was computed in this recording, so that nothing can be learnt from it")
    taken_s = np.array([each.taken_s for each in steps])
    if taken_s.min() <= 0:
        raise ValueError(
            f"step {taken_s.argmin()} took {taken_s.min():g} s by the recording's clock, which cannot be"
        )
    seen = np.array([each.features for each in steps])
    modelled_s, load = taken_s, np.ones(len(taken_s))
    for _ in range(8):
        # Weighting by the real time would make short times count more than long ones, so the modelled time is
        # used. Steps that stalled (a page fault, another process, a compilation) count as if they had stalled
        # less
        weights = 1 / modelled_s
        bounded_s = np.clip(taken_s / load, modelled_s / 3, modelled_s * 3)
        costs_s = non_negative(seen * weights[:, None], bounded_s * weights)
        modelled_s = np.maximum(seen @ costs_s, 1e-9)
        load = loads(taken_s / modelled_s)
    kept = spread(taken_s[-MOST_KEPT:], modelled_s[-MOST_KEPT:], load[-MOST_KEPT:])
    return Fitted(costs_s, seen.max(axis=0), kept, trust(taken_s, modelled_s))


def non_negative(left: Vector, right: Vector) -> Vector:
    """Minimise |left @ x - right| over x >= 0, by the active sets of Lawson and Hanson (1974)."""
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
