"""How many of its guesses does each row let the model check?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from continuous_batching.batch import Batch
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Offers:
    """What rows could have checked in the next step."""

    rows: Index  # [N] of the slot table, oldest request first
    counts: Index  # [N] guesses of each
    starts: Index  # [S] tokens in the cache, of all spans of the step without drafts
    stops: Index  # [S]
    spare_tokens: int  # of the step's budget; beyond it, drafts of the youngest are left out


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What came of guesses that were made, checked by the model or only compared with what it said.

    A row whose request ended within its guesses says nothing about those after its end: they are not counted.
    """

    rows: Index  # [N] of the slot table
    guessed: Index  # [N]
    right: Index  # [N] guesses before the first wrong one


class Lengths(Protocol):
    """Chooses numbers of drafts; a function of what it is given, times included."""

    @property
    def asks(self) -> bool:
        """Whether guesses are to be made at all."""
        ...

    @property
    def is_hopeful(self) -> bool:
        """Whether a step is worth waiting for the tokens of the one before, which guesses must follow."""
        ...

    def choose(self, offers: Offers) -> Index:
        """How many guesses of each row [N] become drafts."""
        ...

    def learn(self, verdicts: Verdicts) -> None:
        """Guesses turned out right or wrong."""
        ...

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """A step took so long and brought so many tokens."""
        ...


class Fixed:
    """All of them."""

    asks = is_hopeful = True

    def choose(self, offers: Offers) -> Index:
        """How many guesses of each row become drafts."""
        return offers.counts

    def learn(self, verdicts: Verdicts) -> None:
        """Nothing is learnt."""

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        """Nothing is learnt."""
