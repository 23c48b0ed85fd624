"""Define the interface by which the number of drafts to verify is chosen, and its simplest form.

`throughput` chooses by measured times and acceptance rates, `source` by a formula; `Fixed` verifies all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from continuous_batching.batch import Batch
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
