"""Count the figures of a run that a benchmark reports, while it runs.

Nothing is kept for each request, unless records are requested: then these are six numbers and its id.

Percentiles of millions of durations are estimated without keeping them (`Sketch`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from kv_cache.pages import Index

Figures = dict[str, float]

LEAST_S, MOST_S, WIDTH = 1e-7, 1e7, 1.002  # least, most, and the ratio between neighbouring bins


class Sketch:
    """A histogram over a logarithmic scale: percentiles are within 0.1 %, in 130 KB for any number of values.

    Mean, least and most are exact. Merging two sketches gives the sketch of all their values.
    """

    __slots__ = ("_counts", "count", "least_s", "most_s", "total_s")

    def __init__(self) -> None:
        self._counts = np.zeros(2 + math.ceil(math.log(MOST_S / LEAST_S) / _STEP), dtype=np.int64)
        self.count = 0
        self.total_s = 0.0
        self.least_s = math.inf
        self.most_s = -math.inf

    def add(self, value_s: float, times: int = 1) -> None:
        """Add a duration `times` times."""
        self._counts[_place(value_s)] += times
        self.count += times
        self.total_s += value_s * times
        self.least_s = min(self.least_s, value_s)
        self.most_s = max(self.most_s, value_s)

    def add_all(self, values_s: NDArray[np.float64]) -> None:
        """Add many durations."""
        least_s, most_s = float(values_s.min()), float(values_s.max())
        if least_s == most_s:  # the usual case: rows that got their tokens together
            self.add(least_s, len(values_s))
            return
        places = np.log(np.clip(values_s, LEAST_S, MOST_S) / LEAST_S) / _STEP
        np.add.at(self._counts, 1 + places.astype(np.int64), 1)
        self.count += len(values_s)
        self.total_s += float(values_s.sum())
        self.least_s = min(self.least_s, least_s)
        self.most_s = max(self.most_s, most_s)

    def merge(self, other: Sketch) -> None:
        """Add all durations of another sketch."""
        self._counts += other._counts
        self.count += other.count
        self.total_s += other.total_s
        self.least_s = min(self.least_s, other.least_s)
        self.most_s = max(self.most_s, other.most_s)

    def share_within(self, limit_s: float) -> float:
        """Return the share of durations that are at most `limit_s`; 1 if there are none."""
        return float(self._counts[: _place(limit_s) + 1].sum()) / self.count if self.count else 1.0

    def quantile_s(self, share: float) -> float:
        """Return a quantile, interpolated between the two values nearest in rank as numpy's percentile is."""
        at = share * (self.count - 1)
        ends = np.cumsum(self._counts)
        low, high = (self._value_s(int(np.searchsorted(ends, rank, side="right"))) for rank in _around(at))
        return low + (high - low) * (at - math.floor(at))

    def milliseconds(self) -> Figures:
        """Return mean and percentiles in milliseconds; empty if there are no durations."""
        if not self.count:
            return {}
        parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        found = {name: self.quantile_s(share) for name, share in parts.items()}
        return {
            name: round(1e3 * each, 3) for name, each in {"mean": self.total_s / self.count, **found}.items()
        }

    def _value_s(self, place: int) -> float:
        middle_s = LEAST_S * math.exp((place - 0.5) * _STEP) if place else 0.0
        return min(max(middle_s, self.least_s), self.most_s)


_STEP = math.log(WIDTH)


def _place(value_s: float) -> int:
    return 1 + int(math.log(min(value_s, MOST_S) / LEAST_S) / _STEP) if value_s > LEAST_S else 0


def _around(rank: float) -> tuple[int, int]:
    return math.floor(rank), math.ceil(rank)


Record = dict[str, Any]
DONE = ("stop", "length")
DIGITS = 4  # least number of significant digits of a rate


def rounded(rate: float, decimals: int) -> float:
    """Round a rate, keeping DIGITS of a small one.

    Multiplied by a long duration it must still give the count.
    """
    leading = math.floor(math.log10(rate)) + 1 if rate > 0 else DIGITS
    return round(rate, max(decimals, DIGITS - leading))


@dataclass(frozen=True, slots=True)
class Answered:
    """The times and lengths of one answered request."""

    id: str
    arrival_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    finish_reason: str

    def record(self, origin_s: float) -> Record:
        """Return the record that the gate recounts; times count from `origin_s`."""
        record = asdict(self)
        for name in ("arrival_s", "first_token_s", "finish_s"):
            record[name] = round(record[name] - origin_s, 6)
        return record


@dataclass(slots=True)
class RunTotals:
    """Totals over all engines of a run, which can be merged. Times are seconds of the virtual clock."""

    requests: int = 0
    completed: int = 0
    prompt_tokens: int = 0  # counts completed requests only, like output_tokens
    output_tokens: int = 0
    steps: int = 0
    spans: int = 0  # samples in a step, summed over steps
    busy_s: float = 0.0  # sum over all devices
    running_s: float = 0.0  # integral of the number of requests in slots over time
    waiting_s: float = 0.0
    held_share: float = 0.0  # share of the pool's pages that is held, summed over steps
    admitted_tokens: int = 0  # prompt tokens of admitted requests
    hit_tokens: int = 0
    preemptions: int = 0
    copied_pages: int = 0
    # Requests that failed after their first token; their gaps are counted in `itl`
    cut_short: int = 0
    first_arrival_s: float = math.inf
    last_arrival_s: float = -math.inf
    last_finish_s: float = -math.inf
    least_output_tokens: float = math.inf
    most_output_tokens: int = 0
    ttft: Sketch = field(default_factory=Sketch)
    tpot: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)
    e2e: Sketch = field(default_factory=Sketch)
    records: list[Record] | None = None  # one for each request that ended, if they are to be kept

    def figures(self) -> dict[str, Any]:
        """Return the figures by the names of the offline benchmark, and what the gate needs beside them.

        If some requests failed, there are no means over time, because these cover all requests while rates
        and latencies do not. Nor is there a mean gap if some of the gaps are those of failed requests.
        """
        duration_s = self.last_finish_s - self.first_arrival_s if self.completed else 0.0
        spread_s = self.last_arrival_s - self.first_arrival_s if self.requests else 0.0
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        per_step = 1 / self.steps if self.steps else 0.0
        return {
            "requests": self.requests,
            "completed": self.completed,
            "failed": self.requests - self.completed,
            "duration_s": round(duration_s, 4),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": rounded(self.completed * per_s, 3),
            "output_tokens_per_s": rounded(self.output_tokens * per_s, 2),
            "total_tokens_per_s": rounded((self.prompt_tokens + self.output_tokens) * per_s, 2),
            "ttft_ms": self.ttft.milliseconds(),
            "tpot_ms": self.tpot.milliseconds(),
            "itl_ms": {
                part: each
                for part, each in self.itl.milliseconds().items()
                if part != "mean" or not self.cut_short
            },
            "e2e_ms": self.e2e.milliseconds(),
            "mean_batch": round(self.spans * per_step, 2),
            "mean_page_use": round(self.held_share * per_step, 4),
            "steps": self.steps,
            "prefix_hit_rate": round(self.hit_tokens / max(1, self.admitted_tokens), 4),
            "preemptions": self.preemptions,
            "copied_pages": self.copied_pages,
            "offered_per_s": rounded((self.requests - 1) / spread_s, 4) if spread_s > 0 else None,
            "least_output_tokens": int(self.least_output_tokens) if self.completed else None,
            "most_output_tokens": self.most_output_tokens if self.completed else None,
            **(self._means(per_s) if self.completed == self.requests else {}),
        }

    def _means(self, per_s: float) -> dict[str, float]:
        return {
            "mean_running": rounded(self.running_s * per_s, 4),
            "mean_in_system": rounded((self.running_s + self.waiting_s) * per_s, 4),
        }

    def came(self, request: Request) -> None:
        """Count a request that was offered, whether it is accepted or not, and each further sample of it."""
        self.requests += 1 + len(request.followers)
        self.first_arrival_s = min(self.first_arrival_s, request.arrival_s)
        self.last_arrival_s = max(self.last_arrival_s, request.arrival_s)

    def ended(self, request: Request) -> None:
        """Count a request that ended; only answered requests have figures."""
        if request.finish_reason not in DONE:
            self.cut_short += request.first_token_s is not None
            return
        assert request.first_token_s is not None, "an answered request has its times"
        assert request.finish_s is not None, "an answered request has its times"
        self.answered(
            Answered(
                request.id,
                request.arrival_s,
                request.first_token_s,
                request.finish_s,
                request.num_prompt_tokens,
                request.params.max_tokens,
                len(request.answer),
                request.finish_reason,
            )
        )

    def answered(self, one: Answered) -> None:
        """Count an answered request."""
        num_tokens = one.output_tokens
        self.completed += 1
        self.prompt_tokens += one.prompt_tokens
        self.output_tokens += num_tokens
        self.least_output_tokens = min(self.least_output_tokens, num_tokens)
        self.most_output_tokens = max(self.most_output_tokens, num_tokens)
        self.last_finish_s = max(self.last_finish_s, one.finish_s)
        self.ttft.add(one.first_token_s - one.arrival_s)
        self.e2e.add(one.finish_s - one.arrival_s)
        if num_tokens > 1:
            self.tpot.add((one.finish_s - one.first_token_s) / (num_tokens - 1))
        if self.records is not None:
            self.records.append(one.record(self.first_arrival_s))


class StepCounter:
    """Counts the steps of one engine into a RunTotals, and remembers when each row got its last token."""

    def __init__(self, engine: Engine, totals: RunTotals) -> None:
        self.engine = engine
        self.totals = totals
        num_slots = engine.slots.num_slots
        self._last_s = np.zeros(num_slots)
        # Number of the request that `_last_s` belongs to
        self._owner = np.full(num_slots, -1, dtype=np.int64)
        self._parked: dict[int, float] = {}  # time of the last token of preempted requests, by number
        self._even: Index | None = None  # the busy rows, if all of them got their last tokens together
        self._even_s = 0.0  # time of these tokens
        self._before_s, self._left = 0.0, 0
        self._seen = (0, 0, 0)

    def added(self, request: Request) -> None:
        """Count the time that each sample waited for the step in progress before the engine took it."""
        counted_from_s = self._before_s if self._left else self.engine.clock()
        waited_s = counted_from_s - request.arrival_s
        self.totals.waiting_s += (1 + len(request.followers)) * waited_s

    def step(self, step: Step) -> None:
        """Count one step, before the next one is made."""
        totals, engine, batch = self.totals, self.engine, step.batch
        scheduler = engine.scheduler
        num_waiting, num_running = scheduler.num_waiting, len(engine.slots.busy) + len(step.finished)
        taken_s = step.end_s - (self._before_s if self._left else step.start_s)
        begin_s = max(step.start_s, self._before_s)  # it may have waited on the device for the step before
        totals.running_s += num_running * taken_s
        totals.waiting_s += num_waiting * taken_s
        self._before_s, self._left = step.end_s, num_running + num_waiting - len(step.finished)
        if batch.num_spans:
            pool = scheduler.pool
            held = pool.num_held - scheduler.prefix.num_idle
            totals.steps += 1
            # A sample that forks in this step gets a token from its leader's span
            num_forks = np.count_nonzero(batch.slots[batch.sampled] != batch.owners)
            totals.spans += batch.num_spans + int(num_forks)
            totals.copied_pages += batch.num_copied_pages
            totals.busy_s += step.end_s - begin_s
            totals.held_share += held / (pool.num_pages - 1)
            if len(batch.owners):
                self.gaps(step)
        for request in step.finished:
            self.ended(request)
            self._parked.pop(request.number, None)
            self._owner[self._owner == request.number] = -1
        if step.finished:
            self._settle()

    def ended(self, request: Request) -> None:
        """Count a request that ended in this engine."""
        self.totals.ended(request)

    def rest(self, start_s: float, end_s: float) -> None:
        """Count a time in which nothing was computed while requests waited."""
        num_waiting, num_running = self.engine.scheduler.num_waiting, len(self.engine.slots.busy)
        taken_s = end_s - (self._before_s if self._left else start_s)
        self.totals.running_s += num_running * taken_s
        self.totals.waiting_s += num_waiting * taken_s
        self._before_s, self._left = end_s, num_running + num_waiting

    def close(self) -> None:
        """Add what the scheduler has counted since the last call."""
        counters, seen = self.engine.scheduler.counters, self._seen
        now = counters.prompt_tokens, counters.hit_tokens, counters.preemptions
        self.totals.admitted_tokens += now[0] - seen[0]
        self.totals.hit_tokens += now[1] - seen[1]
        self.totals.preemptions += now[2] - seen[2]
        self._seen = now

    def gaps(self, step: Step) -> None:
        """Count the time since each row's last token; a row may hold another request than before."""
        rows, end_s, busy = step.owners, step.end_s, self.engine.slots.busy
        has_drafts = step.batch.num_drafts > 0  # a row may have several tokens, which come together
        if (
            busy is self._even and len(rows) == len(busy) and not has_drafts
        ):  # the usual case: decode after decode of the same rows
            self.totals.itl.add(end_s - self._even_s, len(rows))
            self._even_s = end_s
            return
        self._settle()
        numbers = self.engine.slots.number[rows]
        is_new = numbers != self._owner[rows]
        has_new = bool(is_new.any())
        if has_new:
            new, first = np.unique(rows[is_new], return_index=True)
            newcomers = numbers[is_new][first]
            for row, owner in zip(new.tolist(), self._owner[new].tolist()):
                if owner >= 0:
                    self._parked[owner] = float(self._last_s[row])
            self._owner[new] = -1
            self._last_s[new] = [self.since_s(number) for number in newcomers.tolist()]
            self._owner[new] = newcomers
        gaps_s = end_s - self._last_s[rows]
        if has_drafts:
            gaps_s[1:][rows[1:] == rows[:-1]] = 0.0
        self._last_s[rows] = end_s
        if has_new:
            gaps_s = gaps_s[~np.isnan(gaps_s)]
        if len(gaps_s):
            self.totals.itl.add_all(gaps_s)
        if not has_drafts and len(rows) == len(busy) and np.array_equal(rows, busy):
            self._even, self._even_s = busy, end_s

    def _settle(self) -> None:
        """Store the common time of the rows that got their tokens together, which may differ from now on."""
        if self._even is not None:
            self._last_s[self._even] = self._even_s
            self._even = None

    def since_s(self, number: int) -> float:
        """Return when a request that is new to its row got its last token; NaN if it had none."""
        # It may be the row from which the request was preempted
        for row in np.flatnonzero(self._owner == number).tolist():
            self._owner[row] = -1
            return float(self._last_s[row])
        return self._parked.pop(number, math.nan)
