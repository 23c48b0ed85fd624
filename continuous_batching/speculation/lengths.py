"""Choose how many drafts of each row are verified.

`Fixed` verifies all. `Source` follows a formula of the article "Dynamic batching" (动态批处理): it takes
the speedup of k drafts to be (1 + a + ... + a^k) / (1 + 0.1 k), a being the mean of the latest shares of
drafts that were accepted, and knows neither the number of rows nor the time of a step.

`Throughput` chooses the number with which a step brings the most tokens a second: (rows + what the likeliest
drafts bring) / predicted time of the step. A draft brings a token if it and all drafts before it are
accepted: its chance is the acceptance rate of its row's first draft, times that of each following one
(`Acceptance`). Making proposals costs time of the host, which no prediction of a step includes: so steps with
and without proposals alternate, and their measured tokens a second are compared (`Worth`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import StepTime
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Offers:
    """The drafts that rows could have verified in the next step."""

    rows: Index  # [N] rows of the slot table, oldest request first
    counts: Index  # [N] drafts of each row
    starts: Index  # [S] tokens in the cache, for all spans of the step without drafts
    stops: Index  # [S]
    # Left of the step's budget; drafts of the youngest rows beyond it are dropped
    spare_tokens: int


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The outcome of drafts, whether the model verified them or they were only compared with its tokens.

    A row whose request ended within its drafts says nothing about those after its end, which are not counted.
    """

    rows: Index  # [N] rows of the slot table
    guessed: Index  # [N]
    right: Index  # [N] drafts before the first wrong one


class Lengths(Protocol):
    """Chooses numbers of drafts, as a function of its inputs, times included."""

    @property
    def asks(self) -> bool:
        """Whether drafts are to be proposed at all."""
        ...

    @property
    def is_hopeful(self) -> bool:
        """Whether the next step should wait for the tokens in flight, because drafts must follow them."""
        ...

    def choose(self, offers: Offers) -> Index:
        """Return how many drafts of each row [N] are verified."""
        ...

    def learn(self, verdicts: Verdicts) -> None:
        """Learn from drafts that were right or wrong."""
        ...

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn from the time and the number of tokens of a step."""
        ...


class Fixed:
    """Verifies all drafts that are offered."""

    asks = is_hopeful = True

    def choose(self, offers: Offers) -> Index:
        """Return the number offered for each row."""
        return offers.counts

    def learn(self, verdicts: Verdicts) -> None:
        """Learn nothing."""

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn nothing."""


_DRAFT_COST = 0.1  # cost of a draft, as a share of a step of the target model
_LEAST_RATE = 0.001  # acceptance rate below which the base length is used


class Source:
    """The same number of drafts for every row, from `least` to `most`; `base` before anything is known.

    `window` is the number of shares that are remembered.
    """

    asks = is_hopeful = True

    def __init__(self, base: int, least: int, most: int, window: int) -> None:
        assert 0 <= least <= base <= most, f"{base} drafts are not from {least} to {most}"
        assert window >= 1, "a window without a share"
        self._base, self._least, self._most = base, least, most
        self._shares = deque[float](maxlen=window)

    def choose(self, offers: Offers) -> Index:
        """Return how many drafts of each row are verified."""
        return np.minimum(offers.counts, self.best())

    def best(self) -> int:
        """Return the length with the largest speedup, the shortest of equal ones."""
        rate = sum(self._shares) / len(self._shares) if self._shares else 0.0
        if rate < _LEAST_RATE:
            return self._base
        lengths = range(self._least, self._most + 1)
        return max(lengths, key=lambda k: sum(rate**i for i in range(k + 1)) / (1 + _DRAFT_COST * k))

    def learn(self, verdicts: Verdicts) -> None:
        """Remember the shares of drafts that were right."""
        self._shares.extend((verdicts.right / verdicts.guessed).tolist())

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn nothing, because no time enters the formula."""


Floats = NDArray[np.float64]
_ROW_KEPT = 0.9  # share of a row's counts that is kept at each of its verdicts
_PRIOR_KEPT = 0.995  # share of the counts over all rows that is kept at each verdict of any row
_PRIOR_WEIGHT = 4.0  # trials for which the rate of all rows counts in a row's own
_FIRST_RIGHT, _FIRST_TRIALS = 4.0, 8.0  # counts assumed before any verdict
FIRST, LATER = 0, 1


class Acceptance:
    """Decaying acceptance rates of each request: of its first draft, and of one behind an accepted draft.

    They are kept apart because a row without drafts still shows whether its first draft would have been
    right. A request with few trials is taken to be like the mean of all. Its counts follow it to another row;
    for requests without a row, as many are kept as there are rows.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        # Number of the request whose estimates a row holds
        self._number = np.full(slots.num_slots, -1, dtype=np.int64)
        self._right: Floats = np.zeros((2, slots.num_slots))
        self._trials: Floats = np.zeros((2, slots.num_slots))
        self._all_right: Floats = np.full(2, _FIRST_RIGHT)
        self._all_trials: Floats = np.full(2, _FIRST_TRIALS)
        self._away: dict[int, tuple[Floats, Floats]] = {}  # keyed by number, for requests that lost their row

    def rates(self, rows: Index) -> Floats:
        """Return acceptance rates of rows [N]: the first draft's, and that behind an accepted one. [2, N]"""
        self._follow(rows)
        prior = (self._all_right / self._all_trials)[:, None] * _PRIOR_WEIGHT
        rates: Floats = (self._right[:, rows] + prior) / (self._trials[:, rows] + _PRIOR_WEIGHT)
        return rates

    def learn(self, verdicts: Verdicts) -> None:
        """Update the rates by drafts that were right or wrong."""
        rows, guessed, right = verdicts.rows, verdicts.guessed, verdicts.right
        self._follow(rows)
        trials = np.stack([guessed > 0, np.minimum(right, guessed - 1)]).astype(np.float64)
        hits = np.stack([right > 0, np.maximum(right - 1, 0)]).astype(np.float64)
        # A verdict that says nothing about later drafts does not decay their counts
        kept = np.where(trials > 0, _ROW_KEPT, 1.0)
        self._right[:, rows] = self._right[:, rows] * kept + hits
        self._trials[:, rows] = self._trials[:, rows] * kept + trials
        all_kept = _PRIOR_KEPT ** (trials > 0).sum(axis=1)
        self._all_right = self._all_right * all_kept + hits.sum(axis=1)
        self._all_trials = self._all_trials * all_kept + trials.sum(axis=1)

    def _follow(self, rows: Index) -> None:
        """Load the estimates of the requests that are in these rows now."""
        numbers = self._slots.number[rows]
        changed = np.flatnonzero(numbers != self._number[rows])
        if not len(changed):
            return
        for row in rows[changed].tolist():
            if self._trials[FIRST, row]:
                self._away[int(self._number[row])] = self._right[:, row].copy(), self._trials[:, row].copy()
        for row, number in zip(rows[changed].tolist(), numbers[changed].tolist()):
            right, trials = self._away.pop(number, (0.0, 0.0))
            self._right[:, row], self._trials[:, row], self._number[row] = right, trials, number
        while len(self._away) > self._slots.num_slots:
            del self._away[next(iter(self._away))]


_FIRST_STEPS = 64  # first steps with proposals, in which it is learnt which of them pay
_ASKED_TRIAL, _PLAIN_TRIAL = 16, 4  # steps of a trial with proposals, whose tokens vary, and of one without
_OLD_KEPT = 0.25  # share of an alternative's statistics that is kept when it is tried again
_TRIAL_COST = 0.005  # share of the tokens given up for trials of the slower alternative
_LEAST_TIMES = 0.98  # ratio of rates that suffices while it is learnt which proposals pay
_LEAST_STEPS, _MOST_STEPS = 128, 2048  # steps between two trials
_STEP_KEPT = 0.97  # share of the statistics that is kept at each step
_SAME_LOAD = 4 / 3  # a load of more rows than this ratio, or fewer, is another load
# Limit of a step's time to the mean of its kind; what exceeds it is a disturbance of the machine
_MOST_RATIO = 3.0


@dataclass(slots=True)
class Rate:
    """Decaying totals of tokens and seconds."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens a second; requires at least one step."""
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Add one step."""
        if self.tokens:
            seconds = min(seconds, _MOST_RATIO * tokens / self.per_second)
        self.tokens, self.seconds = self.tokens * _STEP_KEPT + tokens, self.seconds * _STEP_KEPT + seconds


class Worth:
    """Says whether to propose drafts, from the rates of steps that only decode.

    Proposals come first. Then the slower alternative is tried for a few steps from time to time, the sooner
    the smaller the difference is. For another number of rows everything is learnt anew.
    """

    def __init__(self) -> None:
        self.asks = self._is_trial = True
        self._begin(0)

    def _begin(self, num_rows: int) -> None:
        self._num_rows, self._asked, self._plain = num_rows, Rate(), Rate()
        self._try(asks=True)
        self._until_turn = _FIRST_STEPS

    def observe(self, num_rows: int, tokens: int, took_s: float) -> None:
        """Learn from a step of `num_rows` decodes that committed `tokens` tokens."""
        if took_s <= 0:
            return
        if not self._num_rows / _SAME_LOAD <= num_rows <= self._num_rows * _SAME_LOAD:
            self._begin(num_rows)
        (self._asked if self.asks else self._plain).add(tokens, took_s)
        self._until_turn -= 1
        if self._until_turn > 0:
            return
        if not (self._plain.tokens and self._asked.tokens):
            self._try(asks=bool(self._plain.tokens))
            return
        times = self._asked.per_second / self._plain.per_second
        pays = times >= _LEAST_TIMES
        if self._is_trial or pays != self.asks:
            self.asks, self._is_trial = pays, False
            lost = (1 - 1 / times) * _PLAIN_TRIAL if pays else (1 - times) * _ASKED_TRIAL
            self._until_turn = int(min(max(lost / _TRIAL_COST, _LEAST_STEPS), _MOST_STEPS))
        else:
            self._try(asks=not self.asks)

    def _try(self, *, asks: bool) -> None:
        tried = self._asked if asks else self._plain
        tried.tokens, tried.seconds = tried.tokens * _OLD_KEPT, tried.seconds * _OLD_KEPT
        self.asks, self._is_trial = asks, True
        self._until_turn = _ASKED_TRIAL if asks else _PLAIN_TRIAL


_LEAST_GAIN = 1.04  # least gain in tokens a second over a step without drafts
_PROBE_COST = 0.005  # share of the time spent on drafts that do not seem to pay
_LEAST_PROBE_STEPS = 64  # steps between two such probes
# Share of the tokens given up for steps without drafts, so that the time of these stays known
_PLAIN_COST = 0.005
# Steps with drafts between two steps without; fewer while few plain steps are known
_LEAST_DRAFTED, _MOST_DRAFTED = 8, 64
_PLAIN_KEPT = 0.99  # share of the count of plain steps that is kept at each step
_MOST_LOOK_STEPS = 128
_LIKELY = 2 / 3  # acceptance rate of first drafts that counts as likely


class Throughput:
    """Chooses for each row by its own acceptance rate, down to none, for the most tokens a second.

    If drafts do not seem to pay, first proposals are still compared with the sampled tokens, and from time to
    time drafts that could pay are verified: in at most one of `_LEAST_PROBE_STEPS` steps, and for
    `_PROBE_COST` of the predicted time.

    If steps are scheduled ahead, a proposal costs the wait for the last tokens, before its step and after it.
    It is made in every step while drafts pay, and in one of `_MOST_LOOK_STEPS` while proposals are wrong,
    missing or could not pay: each that is likely right quarters that distance, any other resets it, and a
    missing one doubles it. (A proposal that is right half of the time is made in one of 70 steps.)
    """

    def __init__(self, slots: SlotPool, step_time: StepTime) -> None:
        self._acceptance = Acceptance(slots)
        self._step_time = step_time  # the scheduler's own, which observes each step
        self._num_drafted = 0  # steps with drafts since one without
        self._num_plain = 0  # steps without drafts since one with
        self._plain_s = 0.0  # time of these steps
        self._known_plain = 0.0  # decaying count of steps without drafts
        self._could_pay = True  # whether drafts would pay if all were accepted
        self._pays = True  # whether the last choice pays, if there was one
        # Whether the last proposals were likely right; None: there were none
        self._is_likely: bool | None = None
        self._look_steps = 1
        self._until_look = 0
        self._worth = Worth()
        self._looks_ahead = False  # whether steps are scheduled ahead

    @property
    def asks(self) -> bool:
        """Whether proposals have been worth the host time of making them, or steps are scheduled ahead.

        In the latter case `is_hopeful` decides when they are made.
        """
        return self._worth.asks or self._looks_ahead

    @property
    def is_hopeful(self) -> bool:
        """Whether the next step should wait for the tokens in flight."""
        return self._until_look == 0

    def choose(self, offers: Offers) -> Index:
        """Return how many drafts of each row are verified."""
        most = int(offers.counts.max())
        first, later = self._acceptance.rates(offers.rows)
        ahead = np.arange(most)
        chances = first[:, None] * later[:, None] ** ahead
        chances[ahead >= offers.counts[:, None]] = 0
        ordered = np.sort(chances[chances > 0])[::-1][: offers.spare_tokens]
        gains = np.concatenate(([0.0], ordered.cumsum()))
        seconds = self._seconds(offers, len(ordered))
        num_rows = self._num_rows(offers)
        is_known = seconds[0] > 0
        best = self._best(gains, seconds, num_rows) if is_known else len(ordered)
        drafts: Index = (chances > ordered[best - 1]).sum(axis=1) if best else np.zeros_like(offers.counts)
        if best:  # the oldest of equally likely rows go first
            equal = (chances == ordered[best - 1]).sum(axis=1)
            left = best - int(drafts.sum())
            drafts = drafts + np.clip(left - (equal.cumsum() - equal), 0, equal)
        return drafts

    def _best(self, gains: Floats, seconds: Floats, num_rows: int) -> int:
        """Return the number of drafts of the step."""
        rates = (num_rows + gains) / seconds
        plain, best = rates[0], int(rates.argmax())
        certain = (num_rows + np.arange(len(gains))) / seconds
        self._could_pay = bool(certain.max() >= _LEAST_GAIN * plain)
        self._pays = bool(rates[best] >= _LEAST_GAIN * plain)
        if self._pays:
            gain = rates[best] / plain - 1
            steps = np.clip(gain / (1 + gain) / _PLAIN_COST, _LEAST_DRAFTED, _MOST_DRAFTED)
            # The smaller a gain, the more easily it is only noise
            known = 1 + 10 * gain * self._known_plain
            return best if self._num_drafted < min(steps, known) else 0
        likeliest = int(rates[1:].argmax()) + 1
        extra_s = seconds[likeliest] - seconds[0] * (1 + gains[likeliest] / num_rows)
        is_due = self._num_plain >= _LEAST_PROBE_STEPS and extra_s <= _PROBE_COST * self._plain_s
        return likeliest if is_due and gains[likeliest] >= (_LEAST_GAIN - 1) * num_rows else 0

    def _seconds(self, offers: Offers, most: int) -> Floats:
        """Predict the time of the step's decodes with 0, 1, ... `most` drafts. [most + 1]

        The time of prompts beside them is not charged to drafts, but a draft then costs what a token of such
        a step costs.
        """
        lens = offers.stops - offers.starts
        decodes = lens == 1
        num_rows = self._num_rows(offers)
        costs, context = self._step_time.decodes, int(offers.starts[decodes].sum())
        plain_s = costs.seconds(num_rows, context)
        drafted_s, token_s = costs.drafted_s, costs.token_s
        if len(lens) > num_rows:
            drafted_s, token_s = 0.0, max(token_s, self._step_time.prompt_token_s)
        counts = np.arange(most + 1)
        seconds: Floats = plain_s + drafted_s * (counts > 0) + token_s * counts
        return seconds

    def _num_rows(self, offers: Offers) -> int:
        return int((offers.stops - offers.starts == 1).sum())

    def learn(self, verdicts: Verdicts) -> None:
        """Learn from drafts that were right or wrong."""
        self._acceptance.learn(verdicts)
        self._is_likely = bool((verdicts.right > 0).mean() >= _LIKELY)

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Learn from the time and the number of tokens of a step."""
        self._looks_ahead |= len(batch.unknown) > 0
        if batch.num_tokens == batch.num_spans + batch.num_drafts:
            self._worth.observe(batch.num_spans, tokens, took_s)
        self._known_plain = self._known_plain * _PLAIN_KEPT + (not batch.num_drafts)
        if batch.num_drafts:
            self._num_drafted += 1
            self._num_plain, self._plain_s = 0, 0.0
            if self._pays:
                self._look_steps = 1
        else:
            self._num_drafted = 0
            self._num_plain += 1
            self._plain_s += took_s
            if len(batch.unknown):  # it was scheduled ahead, and nothing was proposed
                self._until_look = max(0, self._until_look - 1)
                return
            if batch.num_tokens == batch.num_spans:  # other steps say nothing about proposals
                self._look_steps = self._next_look()
        self._until_look = self._look_steps - 1
        self._is_likely = None

    def _next_look(self) -> int:
        if self._is_likely is None:
            return min(2 * self._look_steps, _MOST_LOOK_STEPS)
        return max(1, self._look_steps // 4) if self._is_likely and self._could_pay else _MOST_LOOK_STEPS
