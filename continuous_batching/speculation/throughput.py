"""Choose the number of drafts with which a step brings the most tokens a second.

The rate is (rows + what the likeliest drafts bring) / predicted time of the step. A draft brings a token if
it and all drafts before it are accepted: its chance is the acceptance rate of its row's first draft, times
that of each following one.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.acceptance import Acceptance, Floats
from continuous_batching.speculation.lengths import Offers, Verdicts
from continuous_batching.speculation.worth import Worth
from continuous_batching.step_time import StepTime
from kv_cache.pages import Index

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
        plain_s = costs.step_s + costs.token_s * num_rows + costs.context_s * context
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
