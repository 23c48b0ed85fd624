"""Do guesses bring more than it costs to make them?

A guess costs the host's time, which no prediction of a step knows: so steps with guesses and without take
turns, and the tokens a second of both say it.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_STEPS = 64  # with guesses, in which it is learnt which pay
_ASKED_TRIAL, _PLAIN_TRIAL = 16, 4  # steps with guesses, whose tokens vary, and without
_OLD_KEPT = 0.25  # of what was known of a way, when it is tried again
_TRIAL_COST = 0.005  # of the tokens, for trials of what is slower
_LEAST_TIMES = 0.98  # as many tokens a second, while it is learnt which guesses pay
_LEAST_STEPS, _MOST_STEPS = 128, 2048  # between two trials
_KEPT = 0.97  # of what was known, at each step
_SAME_LOAD = 4 / 3  # times as many rows, or as few, are another load
_MOST_RATIO = 3.0  # of a step's time to its kind's mean: what is beyond it is the machine's business


@dataclass(slots=True)
class Rate:
    """Tokens and seconds of steps, which fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens; asked for once there is a step."""
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float) -> None:
        """One step more."""
        if self.tokens:
            seconds = min(seconds, _MOST_RATIO * tokens / self.per_second)
        self.tokens, self.seconds = self.tokens * _KEPT + tokens, self.seconds * _KEPT + seconds


class Worth:
    """Says whether guesses are to be made, from what steps of decodes alone have brought.

    Guesses come first. Then the slower way is tried for a few steps now and then: the sooner, the less it is
    slower. Of another number of rows all is learnt anew.
    """

    def __init__(self) -> None:
        self.asks = self._is_trial = True
        self._begin(0)

    def _begin(self, num_rows: int) -> None:
        self._num_rows, self._asked, self._plain = num_rows, Rate(), Rate()
        self._try(asks=True)
        self._until_turn = _FIRST_STEPS

    def observe(self, num_rows: int, tokens: int, took_s: float) -> None:
        """A step of so many decodes brought so many tokens."""
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
