"""Count what the server does, in plain numbers.

Some of them change with every token, so updates are cheap; names and formats are added when metrics are read
(exposition.py).

While there is work, a summary of them is written to the log every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from types import MappingProxyType
from typing import Protocol

import numpy as np
from prometheus_client.utils import floatToGoString

from continuous_batching.inspection import Usage
from serving.answers.answers import AnswerStream
from serving.engine.messages import Beat, EngineFacts, ExpertTable, SampleEnd, StepTimes
from serving.fingerprint import ServedWeights

# The headers by which a request's client names the trace that it belongs to (W3C Trace Context), during that
# request.
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("TRACE_HEADERS", default=MappingProxyType({}))
_MOST_INTERVALS = 1000
MOST_RECENT = 2**16  # times that are kept for the next sample of the history
NO_GAUGES = Usage(0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0.0, 0.0, {}, 0, 0, 0, 0, 0, 0)
REJECTS = ("queue_full", "refused", "starting", "lost", "draining", "dead", "asleep")
ABORTS = ("disconnect", "slow_reader", "asked", "shutdown", "engine_lost", "timeout", "sibling", "order")
ENDS = ("stop", "length", "abort", "timeout", "error", "blocked", "refused", "engine_lost")
RESPONSES = ("200", "400", "401", "404", "413", "429", "499", "500", "503")
HELD_BACK = ("slots", "tokens", "policy", "pages", "tier")
LOOKUPS = ("whole", "too_short", "other_salt", "evicted", "window_evicted", "no_state", "unaligned", "unseen")


# The bounds are in seconds and are vLLM's, with finer ones where a small model needs them.
TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
PER_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8),
    *(1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))


class OrderedState(Protocol):
    """What the metrics tell of an operator's orders."""

    is_paused: bool
    is_asleep: bool
    num_updates: int
    weights: ServedWeights


class Histogram:
    """The number of values at or below each of its ascending bounds, and their sum."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add a value; takes a few hundred nanoseconds."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Add many values, at about a tenth of the cost of `observe` for each."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self._counts)).tolist()
        self._counts = [count + more for count, more in zip(self._counts, found)]
        self.sum += sum(values)

    def copy(self) -> Histogram:
        """Return a copy of the present state."""
        copy = Histogram(self.bounds)
        copy.sum, copy._counts = self.sum, self._counts.copy()
        return copy

    @property
    def num(self) -> int:
        return sum(self._counts)

    def buckets(self, scale: float = 1.0) -> list[tuple[str, int]]:
        """Return each bound times `scale`, as text, with the number of values at or below it.

        The text is what Prometheus's own clients write, and so vLLM: rules and sums compare it.
        """
        # A scaled bound is rounded: 50 millionths would end in many digits
        bounds = map(floatToGoString, (f"{each * scale:.6g}" for each in self.bounds))
        found, total = [], 0
        for bound, count in zip((*bounds, "+Inf"), self._counts):
            total += count
            found.append((bound, total))
        return found


class CounterSums:
    """The sums, over all engines, of counters that start from 0 with each engine."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self._last: Mapping[str, int] = {}

    def follow(self, counters: Mapping[str, int]) -> None:
        """Add what a new reading of the running engine counts more than the last one."""
        for name, value in counters.items():
            more = max(0, value - self._last.get(name, 0))
            self.totals[name] = self.totals.get(name, 0) + more
        self._last = counters

    def restart(self) -> None:
        """Prepare for another engine, which counts from 0."""
        self._last = {}

    def __getitem__(self, name: str) -> int:
        return self.totals.get(name, 0)


class ServerStats:
    """Counts events within the event loop; times are in seconds.

    A sample is one of a request's `n`; each ends for one reason of ENDS. `error` is a failure of the model or
    of its device, `blocked` one that is due to what the request asked for.
    """

    def __init__(self) -> None:
        self.model = ""  # the model's name for clients
        self.facts: EngineFacts | None = None  # facts of the engine that runs
        self.num_engines = 0  # engines that became ready
        self.start_s = 0.0  # how long the last engine took to start
        self.start_stages_s: dict[str, float] = {}  # how long each stage of that took
        self.num_requests = 0  # requests sent to the engine
        self.num_samples = 0
        self.num_open = 0  # samples that have not ended
        self.rejects: Counter[str] = Counter()
        self.aborts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.responses: Counter[str] = Counter()  # keyed by HTTP status
        self.held_back_s = defaultdict[str, float](float)
        self.counters = CounterSums()
        self.lookups = CounterSums()
        self.accepted_at = CounterSums()  # accepted drafts, by their position in the span from 0
        self.grammars = CounterSums()
        self.tier = CounterSums()  # counters of the page tier, if there is one
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.prompt_tokens = 0
        self.beam_tokens = 0  # tokens of answers that arrive only with their end
        self.num_corrupted = 0
        self.batch_tokens = 0  # tokens of the last step
        self.is_idle = True
        self.num_lost_lines: Callable[[], int] = int  # number of log lines that were lost
        self.orders: OrderedState | None = None  # what an operator has ordered, where there is an engine
        self.is_slow: Callable[[], bool] = bool  # the engine should have sent something by now
        self.silence_limit_s: Callable[[], float] = float  # silence after which the engine is ended
        self._heard_s = self._beat_s = time.monotonic()
        self.last_beat: Beat | None = None  # the last beat of the engine that runs
        self.experts: ExpertTable | None = None  # its last reading, if it counts experts
        self._intervals_s: list[float] = []  # intervals between tokens that are not yet in the histogram
        # Times to first tokens, and between tokens, since they were read last.
        self._recent_s: tuple[deque[float], deque[float]] = (
            deque(maxlen=MOST_RECENT),
            deque(maxlen=MOST_RECENT),
        )
        self._make_histograms()

    def _make_histograms(self) -> None:
        self.first_token_s = Histogram(TO_FIRST_TOKEN)
        self._per_token_s = Histogram(PER_TOKEN)
        self.mean_per_token_s = Histogram(PER_TOKEN)
        self.latency_s = Histogram(PER_REQUEST)
        self.short_latency_s = Histogram((0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))
        self.queue_s = Histogram(PER_REQUEST)
        self.prefill_s = Histogram(PER_REQUEST)
        self.decode_s = Histogram(PER_REQUEST)
        self.inference_s = Histogram(PER_REQUEST)
        self.prompt_lens = Histogram(TOKENS)
        self.answer_lens = Histogram(TOKENS)
        self.longest_lens = Histogram(TOKENS)
        self.asked_lens = Histogram(TOKENS)
        self.asked_samples = Histogram((1, 2, 5, 10, 20))
        self.spans = Histogram([2**power for power in range(9)])
        self.tokens = Histogram((100, 500, 1000, 2000, 4000, 8000, 16000))
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_ms = Histogram((1, 2, 5, 10, 20, 50, 100, 200))
        self.overhead_us = Histogram((10, 50, 100, 500, 1000, 5000))

    @property
    def gauges(self) -> Usage:
        """The gauges of the engine's last beat; all 0 without an engine."""
        return NO_GAUGES if self.last_beat is None else self.last_beat.gauges

    @property
    def held_back(self) -> str | None:
        """What the head of the queue waits for."""
        return None if self.last_beat is None else self.last_beat.held_back

    @property
    def shared_pages(self) -> int:
        """The number of pages that several samples use."""
        return 0 if self.last_beat is None else self.last_beat.shared_pages

    @property
    def silent_s(self) -> float:
        """The time since the last message of an engine."""
        return time.monotonic() - self._heard_s

    @property
    def per_token_s(self) -> Histogram:
        """The histogram of intervals between tokens."""
        self._fold()
        return self._per_token_s

    @property
    def answer_tokens(self) -> int:
        """The number of tokens sampled and sent to clients."""
        return self.first_token_s.num + self.per_token_s.num + self.beam_tokens

    @property
    def draft_accept_rate(self) -> float:
        """The fraction of drafts that were accepted; 0 while there were none."""
        return self.counters["accepted_tokens"] / max(1, self.counters["draft_tokens"])

    @property
    def draft_speedup(self) -> float:
        """The mean number of tokens that a span with drafts yields; without drafts it would be 1."""
        return 1 + self.counters["accepted_tokens"] / max(1, self.counters["drafts"])

    @property
    def batch_utilization(self) -> float:
        """The fraction of the last step's token budget that was used; 0 while there is no work."""
        most = 0 if self.facts is None else self.facts.max_batch_tokens
        return 0.0 if self.is_idle or not most else self.batch_tokens / most

    def _fold(self) -> None:
        intervals_s, self._intervals_s = self._intervals_s, []
        self._per_token_s.observe_all(intervals_s)
        self._recent_s[1].extend(intervals_s)

    def recent_times(self) -> tuple[list[float], list[float]]:
        """Return the times to first tokens, and those between tokens, since the last call."""
        self._fold()
        first_s, next_s = map(list, self._recent_s)
        for each in self._recent_s:
            each.clear()
        return first_s, next_s

    def ready(
        self, facts: EngineFacts, start_s: float, stages_s: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Record that an engine is ready, `start_s` after its start, and how long each stage of it took."""
        self.facts, self.start_s, self.start_stages_s = facts, start_s, dict(stages_s)
        self.num_engines += 1
        self.counters.restart()
        self.lookups.restart()
        self.accepted_at.restart()
        self.grammars.restart()
        self.tier.restart()
        self._heard_s = self._beat_s = time.monotonic()

    def lost(self, reason: str) -> None:
        """Record that an engine ended, or was ended."""
        self.facts = self.last_beat = self.experts = None
        self.is_idle = True
        self.ends["engine_lost"] += self.num_open
        self.num_open = 0

    def added(self, answer: AnswerStream) -> None:
        """Record a request that was sent to the engine."""
        num_samples = len(answer.samples)
        self.num_requests += 1
        self.num_samples += num_samples
        self.num_open += num_samples

    def accepted(self, answer: AnswerStream) -> None:
        """Record that the engine accepted a request that was added."""
        self.prompt_tokens += answer.request.num_prompt_tokens
        self.prompt_lens.observe(answer.request.num_prompt_tokens)
        self.asked_samples.observe(answer.num_answers)
        self.asked_lens.observe(answer.request.params.max_tokens)

    def rejected(self, reason: str) -> None:
        """Record a request that was not accepted, for one reason of REJECTS."""
        self.rejects[reason] += 1

    def refused(self, answer: AnswerStream, reason: str) -> None:
        """Record that the engine refused a request that was added: queue_full or refused."""
        self.rejects[reason] += 1
        self.ends["refused"] += len(answer.samples)
        self.num_open -= len(answer.samples)

    def aborted(self, answer: AnswerStream, reason: str) -> None:
        """Record an aborted request, for one reason of ABORTS.

        The reason `sibling` means that another prompt of the same request was refused, or has failed.
        """
        self.aborts[reason] += 1

    def first_token(self, answer: AnswerStream, since_arrival_s: float) -> None:
        """Record the first token of a sample."""
        self.first_token_s.observe(since_arrival_s)
        self._recent_s[0].append(since_arrival_s)

    def next_token(self, since_last_s: float) -> None:
        """Record a further token of a sample."""
        self._intervals_s.append(since_last_s)

    def ended(self, answer: AnswerStream, index: int, end: SampleEnd, since_arrival_s: float) -> None:
        """Record the end of a sample."""
        self.num_open -= 1
        reason = "blocked" if end.is_at_fault else end.reason
        self.ends[reason] += 1
        self.num_corrupted += reason == "error"
        if end.reason == "timeout":
            self.aborts["timeout"] += 1
        if answer.request.params.beam_width:
            self.beam_tokens += answer.samples[index].num_tokens  # tokens of all hypotheses in the answer
        self.latency_s.observe(since_arrival_s)
        self.short_latency_s.observe(since_arrival_s)
        self.answer_lens.observe(_num_answered(answer, index, end))
        ends = [(at, each) for at, each in enumerate(answer.ends) if each is not None]
        if len(ends) == len(answer.ends):
            self.longest_lens.observe(max(_num_answered(answer, at, each) for at, each in ends))
        if end.queue_s is not None:
            self.queue_s.observe(end.queue_s)
        if end.prefill_s is not None:
            self.prefill_s.observe(end.prefill_s)
        if end.decode_s is not None:
            self.decode_s.observe(end.decode_s)
            self.inference_s.observe((end.prefill_s or 0.0) + end.decode_s)
            num_decoded = end.num_tokens - len(answer.request.known) - 1
            if num_decoded > 0:
                self.mean_per_token_s.observe(end.decode_s / num_decoded)

    def stepped(self, times: StepTimes) -> None:
        """Record a step of the engine."""
        self._heard_s = time.monotonic()
        if len(self._intervals_s) > _MOST_INTERVALS:
            self._fold()
        if not times.num_spans:  # a request ended, and nothing was computed
            return
        self.is_idle = False
        self.batch_tokens = times.num_tokens
        self.prefill_tokens += times.num_prompt_tokens
        self.decode_tokens += times.num_tokens - times.num_prompt_tokens
        self.spans.observe(times.num_spans)
        self.tokens.observe(times.num_tokens)
        self.step_tokens.observe(times.num_tokens)
        self.step_ms.observe(1e3 * times.step_s)
        self.overhead_us.observe(1e6 * max(0.0, times.step_s - times.device_s))

    def beat(self, beat: Beat) -> None:
        """Record the gauges and counters that the engine sent."""
        self._heard_s = now_s = time.monotonic()
        if beat.held_back is not None:
            self.held_back_s[beat.held_back] += now_s - self._beat_s
        self.last_beat, self._beat_s = beat, now_s
        self.is_idle = not beat.gauges.running_requests
        self.experts = beat.experts or self.experts
        self.counters.follow(asdict(beat.counters) | {"wrong_pages": beat.wrong_pages})
        self.lookups.follow(dict(beat.gauges.lookups.items()))
        self.grammars.follow(asdict(beat.grammars))
        self.tier.follow({} if beat.tier is None else asdict(beat.tier.counters))
        self.accepted_at.follow({str(place): count for place, count in enumerate(beat.accepted_at)})

    def responded(self, status: int) -> None:
        """Record the end of a response, except to a probe; 499: the client disconnected before it began."""
        self.responses[str(status)] += 1


def _num_answered(answer: AnswerStream, index: int, end: SampleEnd) -> int:
    """Return how many tokens of a sample that has ended its client is told of."""
    if answer.request.params.beam_width:
        return end.num_tokens
    # The engine may have counted tokens beyond the stop string in its last step
    return min(end.num_tokens, answer.samples[index].num_tokens)


log = logging.getLogger(__name__)


class Pulse:
    """Logs the differences of the server's counts since the last line."""

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats
        self._last = self._sums()
        self._last_s = time.monotonic()

    def _sums(self) -> tuple[int, int, int, int]:
        stats, counters = self._stats, self._stats.counters
        return stats.answer_tokens, stats.prefill_tokens, counters["hit_tokens"], counters["prompt_tokens"]

    def beat(self) -> None:
        """Log a line, if there is work or was some since the last line."""
        last, self._last = self._last, self._sums()
        last_s, self._last_s = self._last_s, time.monotonic()
        answered, computed, hit, asked = (now - before for now, before in zip(self._last, last))
        if not (answered or computed or self._stats.num_open):
            return
        gauges, took_s = self._stats.gauges, max(1e-9, self._last_s - last_s)
        fields = {
            "running": gauges.running_requests,
            "waiting": gauges.waiting_requests,
            "pages_used": gauges.held_pages,
            "pages": gauges.held_pages + gauges.idle_pages + gauges.free_pages,
            "hit_rate": round(hit / asked, 3) if asked else None,
            "answer_tokens_per_s": round(answered / took_s, 1),
            "prompt_tokens_per_s": round(computed / took_s, 1),
        }
        log.info(
            "running %d, waiting %d, pages %d of %d, found cached %s, tokens/s %.1f out, %.1f of prompts",
            fields["running"],
            fields["waiting"],
            fields["pages_used"],
            fields["pages"],
            "-" if not asked else f"{hit / asked:.0%}",
            answered / took_s,
            computed / took_s,
            extra={"fields": fields},
        )


async def report(stats: ServerStats, every_s: float) -> None:
    """Log a line at this interval, for ever."""
    pulse = Pulse(stats)
    while True:
        await asyncio.sleep(every_s)
        pulse.beat()
