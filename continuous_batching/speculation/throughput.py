"""With how many drafts of which rows does a step bring the most tokens a second?

(rows + what the likeliest drafts bring) / predicted time of the step. A draft brings a token if it is right
and all before it are: its chance is that of its row's first guess, times that of each following one.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.acceptance import Acceptance, Floats
from continuous_batching.speculation.decode_time import DecodeTime
from continuous_batching.speculation.lengths import Offers, Verdicts
from continuous_batching.speculation.worth import Worth
from kv_cache.pages import Index

_LEAST_GAIN = 1.04  # times the tokens a second without drafts
_PROBE_COST = 0.005  # of the time, for drafts that do not seem to pay
_LEAST_PROBE_STEPS = 64  # between two of these
_PLAIN_COST = 0.005  # of the tokens, for steps without drafts, so that it is known what these take
_LEAST_DRAFTED, _MOST_DRAFTED = 8, 64  # steps between two of these; fewer while few are known
_PLAIN_KEPT = 0.99  # of the number that is known, at each step
_MOST_LOOK_STEPS = 128
_LIKELY = 2 / 3  # of first guesses


class Throughput:
    """Chooses for each row by its own acceptance, down to none; no step brings fewer tokens a second for it.

    Where drafts do not seem to pay, first guesses are still compared, and now and then drafts that could pay
    are checked: in one of `_LEAST_PROBE_STEPS` steps at most, and for `_PROBE_COST` of the time, as far as
    that is predicted.

    Where steps are scheduled ahead, a guess costs the wait for the last tokens, before its step and after it.
    It is made in every step while drafts pay, and in one of `_MOST_LOOK_STEPS` while guesses are wrong,
    missing or could not pay: each that is likely right quarters that distance, any other one brings it back
    to that, and a missing one doubles it. (A guess that is right by halves is made in one of 70 steps.)
    """

    def __init__(self, slots: SlotPool) -> None:
        self._acceptance = Acceptance(slots)
        self._time = DecodeTime()
        self._num_drafted = 0  # steps since one without drafts
        self._num_plain = 0  # steps since one with drafts
        self._plain_s = 0.0  # of these
        self._known_plain = 0.0  # steps without drafts, which fade
        self._could_pay = True  # drafts that are all right
        self._pays = True  # what was chosen last, if it was any
        self._is_likely: bool | None = None  # the last guesses; None: there were none
        self._look_steps = 1
        self._until_look = 0
        self._worth = Worth()
        self._looks_ahead = False  # steps are scheduled ahead

    @property
    def asks(self) -> bool:
        """Whether guesses have been worth what it costs to make them; those of `is_hopeful` steps are."""
        return self._worth.asks or self._looks_ahead

    @property
    def is_hopeful(self) -> bool:
        """Whether the next step is worth waiting for."""
        return self._until_look == 0

    def choose(self, offers: Offers) -> Index:
        """How many guesses of each row become drafts."""
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
        if best:  # of equal chances, those of the oldest
            equal = (chances == ordered[best - 1]).sum(axis=1)
            left = best - int(drafts.sum())
            drafts = drafts + np.clip(left - (equal.cumsum() - equal), 0, equal)
        return drafts

    def _best(self, gains: Floats, seconds: Floats, num_rows: int) -> int:
        """The number of drafts of the step."""
        rates = (num_rows + gains) / seconds
        plain, best = rates[0], int(rates.argmax())
        certain = (num_rows + np.arange(len(gains))) / seconds
        self._could_pay = bool(certain.max() >= _LEAST_GAIN * plain)
        self._pays = bool(rates[best] >= _LEAST_GAIN * plain)
        if self._pays:
            gain = rates[best] / plain - 1
            steps = np.clip(gain / (1 + gain) / _PLAIN_COST, _LEAST_DRAFTED, _MOST_DRAFTED)
            # The smaller a gain, the easier noise feigns it
            known = 1 + 10 * gain * self._known_plain
            return best if self._num_drafted < min(steps, known) else 0
        likeliest = int(rates[1:].argmax()) + 1
        extra_s = seconds[likeliest] - seconds[0] * (1 + gains[likeliest] / num_rows)
        is_due = self._num_plain >= _LEAST_PROBE_STEPS and extra_s <= _PROBE_COST * self._plain_s
        return likeliest if is_due and gains[likeliest] >= (_LEAST_GAIN - 1) * num_rows else 0

    def _seconds(self, offers: Offers, most: int) -> Floats:
        """What the step's decodes take with 0, 1, ... `most` drafts. [most + 1]

        The time of prompts beside them is no price of theirs, but their drafts cost what a token costs there.
        """
        lens = offers.stops - offers.starts
        decodes = lens == 1
        num_rows = self._num_rows(offers)
        plain_s, drafted_s, token_s = self._time.predict(num_rows, int(offers.starts[decodes].sum()))
        if len(lens) > num_rows:
            drafted_s, token_s = 0.0, max(token_s, self._time.prompt_token_s)
        counts = np.arange(most + 1)
        seconds: Floats = plain_s + drafted_s * (counts > 0) + token_s * counts
        return seconds

    def _num_rows(self, offers: Offers) -> int:
        return int((offers.stops - offers.starts == 1).sum())

    def learn(self, verdicts: Verdicts) -> None:
        """Guesses turned out right or wrong."""
        self._acceptance.learn(verdicts)
        self._is_likely = bool((verdicts.right > 0).mean() >= _LIKELY)

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """A step took so long and brought so many tokens."""
        self._looks_ahead |= len(batch.unknown) > 0
        if batch.num_tokens == batch.num_spans + batch.num_drafts:
            self._worth.observe(batch.num_spans, tokens, took_s)
        self._time.observe(batch, took_s)
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
            if len(batch.unknown):  # it was scheduled ahead, and nothing was guessed
                self._until_look = max(0, self._until_look - 1)
                return
            if batch.num_tokens == batch.num_spans:  # others say nothing of guesses
                self._look_steps = self._next_look()
        self._until_look = self._look_steps - 1
        self._is_likely = None

    def _next_look(self) -> int:
        if self._is_likely is None:
            return min(2 * self._look_steps, _MOST_LOOK_STEPS)
        return max(1, self._look_steps // 4) if self._is_likely and self._could_pay else _MOST_LOOK_STEPS
