"""Fit the time of a step to the steps of a recorded run, predict it, and judge whether the fit is trusted.

The model is linear in the features of a batch (tokens, spans, context, pairs) with costs that are not
negative, times ratios of real to modelled times that are drawn from the recording (`Spread`).

A mean hides the tail, so the ratios are kept as they were. Short steps and long ones have ratios of their
own: a pause of 20 ms, in which another process had the core, makes a step of 2 ms ten times as long and one
of 200 ms a tenth longer. And slow steps come together, because a disturbance lasts for a while. So the
simulation draws a run of ranks, in the order in which the recorded steps had them among those of their size,
and a rank becomes a ratio by the size of the simulated step.

A disturbance also makes the batches larger: when steps are slow, more requests are there at once. If load and
size were not separated, a large batch would cost what the disturbance costs, and so more than it does without
one. So the load of each stretch of steps is removed before costs and ratios are fitted, and drawn with the
ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from borders.numbers import numbers
from continuous_batching.batch import Batch
from continuous_batching.recording.format import Entry
from continuous_batching.recording.replay import Event, Replayed, replay
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool

Vector = NDArray[np.float64]
STEPS_A_SIZE = 100  # least number of steps of a size, whose ratios are then a distribution up to p99
MOST_SIZES = 12
STEPS_A_STRETCH = 32  # steps over which the load is a median, so that a few slow steps are no load


@dataclass(frozen=True, slots=True)
class Spread:
    """Ratios of real to modelled times by modelled time, and the ranks of the recorded steps."""

    up_to_s: Vector  # rising modelled times that separate one size from the next
    ratios: tuple[Vector, ...]  # rising ratios of each size
    # Rank of each recorded step among the steps of its size, from 0 to 1, in recorded order
    ranks: Vector
    # How much longer all work took around each recorded step, in recorded order
    loads: Vector

    def ratio(self, modelled_s: float, at: int) -> float:
        """Return the ratio of a step of this modelled time that follows recorded step number `at`."""
        of_size = self.ratios[int(self.up_to_s.searchsorted(modelled_s))]
        return float(self.loads[at] * of_size[int(self.ranks[at] * len(of_size))])


def loads(ratios: Vector) -> Vector:
    """Return how much longer than modelled the steps of each stretch took, normalised to a mean of 1."""
    stretches = np.array_split(ratios, max(1, len(ratios) // STEPS_A_STRETCH))
    found: Vector = np.repeat([np.median(each) for each in stretches], [len(each) for each in stretches])
    found /= found.mean()
    return found


def spread(taken_s: Vector, modelled_s: Vector, loads: Vector) -> Spread:
    """Return the spread of steps that took so long, in their order."""
    count = max(1, min(MOST_SIZES, len(taken_s) // STEPS_A_SIZE))
    up_to_s = np.unique(np.quantile(modelled_s, np.arange(1, count) / count))
    size_of = up_to_s.searchsorted(modelled_s)
    sizes, size_of = np.unique(size_of, return_inverse=True)  # drop the sizes that no step has
    ratios, ranks = [], np.empty(len(taken_s))
    for size in range(len(sizes)):
        steps = np.flatnonzero(size_of == size)
        here = taken_s[steps] / (modelled_s[steps] * loads[steps])
        order = here.argsort(kind="stable")
        ranks[steps[order]] = (np.arange(len(steps)) + 0.5) / len(steps)
        ratios.append(here[order].round(5))
    return Spread(up_to_s[sizes[:-1]], tuple(ratios), ranks.round(6), loads.round(5))


FEWEST_STEPS = 300  # p99 of fewer steps is one of the three slowest
MOST_ERROR = 0.3  # median error: half of the steps are further from their modelled time
# Share of the variance between steps that must be explained, if many are far from their modelled times
LEAST_EXPLAINED = 0.2
SMALL_ERROR = 0.1  # median error below which no explanation of the variance is needed
MOST_DRIFT = 0.1  # drift between the halves of the recording, or of a fifth against the whole
MOST_TAIL_DRIFT = 0.25  # the same for p99, of which a recording has fewer cases
MOST_BEYOND = 0.05  # share of simulated steps that are larger than any recorded one


@dataclass(frozen=True, slots=True)
class FitTrust:
    """How well the modelled times of a recording's own steps agree with the real ones."""

    steps: int
    median_error: float  # error of a step, as a share of its modelled time
    explained: float  # share of the variance of log times
    drift: float  # how much longer the same work took in the second half of the recording, as a share
    tail_drift: float  # the same for the 99th percentile of steps
    unsteady: float  # the same for that fifth of the recording which differs most from the whole

    def describe(self, beyond: float | None = None) -> dict[str, Any]:
        """Return this as JSON data, with the doubts in words.

        `beyond` is the share of simulated steps that are larger than any recorded one.
        """
        said = {} if beyond is None else {"larger_than_recorded": round(beyond, 4)}
        return {**asdict(self), **said, "doubts": self.doubts(beyond or 0.0)}

    def doubts(self, beyond: float = 0.0) -> list[str]:
        """Return the reasons why predictions may be wrong; empty for a fit that can be trusted."""
        found = []
        if self.steps < FEWEST_STEPS:
            found.append(f"{self.steps} steps are few; record at least {FEWEST_STEPS}")
        if self.median_error > MOST_ERROR:
            found.append(f"half of the steps are more than {self.median_error:.0%} from their modelled time")
        elif self.explained < LEAST_EXPLAINED and self.median_error > SMALL_ERROR:
            found.append(f"what a step computes explains only {self.explained:.0%} of its time's variance")
        for drift, limit, what in (
            (self.drift, MOST_DRIFT, "steps"),
            (self.tail_drift, MOST_TAIL_DRIFT, "the slowest 1 % of steps"),
        ):
            if abs(drift) > limit:
                took = f"took {abs(drift):.0%} {'longer' if drift > 0 else 'less'} for the same work"
                found.append(f"{what} {took} in the second half of the recording")
        if abs(self.unsteady) > MOST_DRIFT and not found:
            found.append(
                f"a fifth of the recording took {abs(self.unsteady):.0%}"
                f" {'longer' if self.unsteady > 0 else 'less'} for the same work: the machine's load changed"
            )
        if beyond > MOST_BEYOND:
            found.append(f"{beyond:.0%} of the simulated steps are larger than any recorded one")
        return found


def trust(taken_s: Vector, modelled_s: Vector) -> FitTrust:
    """Judge the modelled times of a recording's steps, in their order."""
    ratios = taken_s / modelled_s
    middle = float(np.median(ratios))
    spread, left = np.log(taken_s), np.log(ratios)
    half = len(ratios) // 2
    # A single stall is no load
    bounded_s = np.clip(taken_s, modelled_s * middle / 3, modelled_s * middle * 3)
    whole = bounded_s.sum() / modelled_s.sum()
    fifths = [
        bounded_s[part].sum() / modelled_s[part].sum() / whole - 1
        for part in np.array_split(np.arange(len(ratios)), min(5, len(ratios)))
    ]
    first, second = (ratios[:half], ratios[half:]) if half else (ratios, ratios)
    return FitTrust(
        steps=len(ratios),
        median_error=round(float(np.median(np.abs(ratios / middle - 1))), 4),
        explained=round(1 - float(left.var() / spread.var()), 4) if spread.var() > 1e-12 else 1.0,
        drift=round(float(np.median(second) / np.median(first)) - 1, 4),
        tail_drift=round(float(np.quantile(second, 0.99) / np.quantile(first, 0.99)) - 1, 4),
        unsteady=round(float(max(fifths, key=abs)), 4),
    )


def in_words(trust: dict[str, Any]) -> str:
    """Summarise a judgement in one line."""
    doubts = "; ".join(trust["doubts"])
    fits = (
        f"{trust['steps']} steps, {trust['explained']:.0%} of the variance explained,"
        f" median error {trust['median_error']:.0%}, drift {trust['drift']:+.0%}"
    )
    return f"is not to be trusted: {doubts} ({fits})" if doubts else f"can be trusted ({fits})"


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
            if any(_TRUSTED.read(each) is None for each in fields["trust"].values()):
                raise ValueError(f"its trust is not all numbers, each {_TRUSTED}")
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


_TRUSTED = numbers(-1e15, 1e15)


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
