"""Decide whether proposing drafts is worth the host time that it costs.

Making proposals costs time of the host, which no prediction of a step includes: so steps with and without
proposals alternate, and their measured tokens a second are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_STEPS = 64  # first steps with proposals, in which it is learnt which of them pay
_ASKED_TRIAL, _PLAIN_TRIAL = 16, 4  # steps of a trial with proposals, whose tokens vary, and of one without
_OLD_KEPT = 0.25  # share of an alternative's statistics that is kept when it is tried again
_TRIAL_COST = 0.005  # share of the tokens given up for trials of the slower alternative
_LEAST_TIMES = 0.98  # ratio of rates that suffices while it is learnt which proposals pay
_LEAST_STEPS, _MOST_STEPS = 128, 2048  # steps between two trials
_KEPT = 0.97  # share of the statistics that is kept at each step
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
        self.tokens, self.seconds = self.tokens * _KEPT + tokens, self.seconds * _KEPT + seconds


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
