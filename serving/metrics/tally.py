"""What has the server done so far, in plain numbers?

Kept by hand, because some of it is told for each token; names and formats come when somebody asks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from continuous_batching.inspection import Usage
from serving.engine.messages import Beat, Ended, Facts, StepTimes
from serving.metrics import histogram
from serving.metrics.histogram import Histogram
from serving.metrics.observer import Observer
from serving.metrics.sums import Sums

if TYPE_CHECKING:
    from serving.answers.answers import Answer

_MOST_INTERVALS = 1000
NO_GAUGES = Usage(*[0] * 5, 0.0, *[0] * 3, 0.0, 0.0, {}, *[0] * 6)
REJECTS = ("queue_full", "refused", "starting", "lost", "draining", "dead")
ABORTS = ("disconnect", "slow_reader", "asked", "shutdown", "engine_lost", "timeout", "sibling")
ENDS = ("stop", "length", "abort", "timeout", "error", "refused", "engine_lost")
HELD_BACK = ("slots", "tokens", "policy", "pages")
LOOKUPS = ("whole", "too_short", "other_salt", "evicted", "unaligned", "unseen")


class Tally(Observer):
    """Counts what it is told. A sample is one of a request's `n`; each ends for one reason of ENDS."""

    def __init__(self) -> None:
        self.model = ""  # as clients call it
        self.facts: Facts | None = None  # of the engine that runs
        self.num_engines = 0  # that could serve, since the start
        self.start_s = 0.0  # how long the last of them took
        self.num_requests = 0  # that went to the engine
        self.num_samples = 0
        self.num_open = 0  # samples whose end is not told
        self.rejects: Counter[str] = Counter()
        self.aborts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.responses: Counter[str] = Counter()  # by HTTP's status
        self.held_back_s: Counter[str] = Counter()
        self.counters = Sums()
        self.lookups = Sums()
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.prompt_tokens = 0
        self.beam_tokens = 0  # of answers that are told by their end alone
        self.num_corrupted = 0
        self.batch_tokens = 0  # of the last step
        self.is_idle = True
        self.num_lost_lines: Callable[[], int] = int  # of the log
        self._heard_s = self._beat_s = time.monotonic()
        self._beat: Beat | None = None
        self._intervals_s: list[float] = []  # between tokens, and not yet with the others
        self._make_histograms()

    def _make_histograms(self) -> None:
        self.first_token_s = Histogram(histogram.TO_FIRST_TOKEN)
        self._per_token_s = Histogram(histogram.PER_TOKEN)
        self.mean_per_token_s = Histogram(histogram.PER_TOKEN)
        self.latency_s = Histogram(histogram.PER_REQUEST)
        self.short_latency_s = Histogram((0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))
        self.queue_s = Histogram(histogram.PER_REQUEST)
        self.prefill_s = Histogram(histogram.PER_REQUEST)
        self.decode_s = Histogram(histogram.PER_REQUEST)
        self.inference_s = Histogram(histogram.PER_REQUEST)
        self.prompt_lens = Histogram(histogram.TOKENS)
        self.answer_lens = Histogram(histogram.TOKENS)
        self.longest_lens = Histogram(histogram.TOKENS)
        self.asked_lens = Histogram(histogram.TOKENS)
        self.asked_samples = Histogram((1, 2, 5, 10, 20))
        self.spans = Histogram([2**power for power in range(9)])
        self.tokens = Histogram((100, 500, 1000, 2000, 4000, 8000, 16000))
        self.step_tokens = Histogram(histogram.STEP_TOKENS)
        self.step_ms = Histogram((1, 2, 5, 10, 20, 50, 100, 200))
        self.overhead_us = Histogram((10, 50, 100, 500, 1000, 5000))

    @property
    def gauges(self) -> Usage:
        """Of the engine's last sign of life; all 0 without an engine."""
        return NO_GAUGES if self._beat is None else self._beat.gauges

    @property
    def held_back(self) -> str | None:
        """What the head of the queue waits for."""
        return None if self._beat is None else self._beat.held_back

    @property
    def shared_pages(self) -> int:
        """In use by more than one sample."""
        return 0 if self._beat is None else self._beat.shared_pages

    @property
    def silent_s(self) -> float:
        """For how long no engine has told anything."""
        return time.monotonic() - self._heard_s

    @property
    def per_token_s(self) -> Histogram:
        """From token to token."""
        self._fold()
        return self._per_token_s

    @property
    def answer_tokens(self) -> int:
        """That were sampled, and told."""
        return self.first_token_s.num + self.per_token_s.num + self.beam_tokens

    @property
    def batch_utilization(self) -> float:
        """How much of the last step's budget of tokens was used; 0 while there is no work."""
        most = 0 if self.facts is None else self.facts.max_batch_tokens
        return 0.0 if self.is_idle or not most else self.batch_tokens / most

    def _fold(self) -> None:
        intervals_s, self._intervals_s = self._intervals_s, []
        self._per_token_s.observe_all(intervals_s)

    def ready(self, facts: Facts, start_s: float) -> None:
        self.facts, self.start_s = facts, start_s
        self.num_engines += 1
        self.counters.restart()
        self.lookups.restart()
        self._heard_s = self._beat_s = time.monotonic()

    def lost(self, reason: str) -> None:
        self.facts = self._beat = None
        self.is_idle = True
        self.ends["engine_lost"] += self.num_open
        self.num_open = 0

    def added(self, answer: Answer) -> None:
        num_samples = len(answer.samples)
        self.num_requests += 1
        self.num_samples += num_samples
        self.num_open += num_samples
        self.prompt_tokens += answer.request.num_prompt_tokens
        self.prompt_lens.observe(answer.request.num_prompt_tokens)
        self.asked_samples.observe(answer.num_answers)
        self.asked_lens.observe(answer.request.params.max_tokens)

    def rejected(self, reason: str) -> None:
        self.rejects[reason] += 1

    def refused(self, answer: Answer, reason: str) -> None:
        self.rejects[reason] += 1
        self.ends["refused"] += len(answer.samples)
        self.num_open -= len(answer.samples)

    def aborted(self, answer: Answer, reason: str) -> None:
        self.aborts[reason] += 1

    def first_token(self, answer: Answer, index: int, since_arrival_s: float) -> None:
        self.first_token_s.observe(since_arrival_s)

    def next_token(self, answer: Answer, index: int, since_last_s: float) -> None:
        self._intervals_s.append(since_last_s)

    def ended(self, answer: Answer, index: int, end: Ended, since_arrival_s: float) -> None:
        self.num_open -= 1
        self.ends[end.reason] += 1
        self.num_corrupted += end.reason == "error"
        if end.reason == "timeout":
            self.aborts["timeout"] += 1
        if answer.request.params.beam_width:
            self.beam_tokens += answer.samples[index].num_tokens  # of all hypotheses that are told
        self.latency_s.observe(since_arrival_s)
        self.short_latency_s.observe(since_arrival_s)
        self.answer_lens.observe(end.num_tokens)
        if all(sample.end is not None for sample in answer.samples):
            self.longest_lens.observe(max(sample.end.num_tokens for sample in answer.samples if sample.end))
        if end.queue_s is not None:
            self.queue_s.observe(end.queue_s)
        if end.prefill_s is not None:
            self.prefill_s.observe(end.prefill_s)
        if end.decode_s is not None:
            self.decode_s.observe(end.decode_s)
            self.inference_s.observe((end.prefill_s or 0.0) + end.decode_s)
            if end.num_tokens > 1:
                self.mean_per_token_s.observe(end.decode_s / (end.num_tokens - 1))

    def stepped(self, times: StepTimes) -> None:
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
        self._heard_s = now_s = time.monotonic()
        if beat.held_back is not None:
            self.held_back_s[beat.held_back] += now_s - self._beat_s
        self._beat, self._beat_s = beat, now_s
        self.is_idle = not beat.gauges.running_requests
        self.counters.follow(asdict(beat.counters) | {"wrong_pages": beat.wrong_pages})
        self.lookups.follow(beat.gauges.lookups)

    def responded(self, status: int) -> None:
        self.responses[str(status)] += 1
