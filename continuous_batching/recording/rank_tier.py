"""Let all ranks look up pages in their tiers, and use as many of them as every rank has found.

Each rank keeps its share of a page under the same key, in entries of its own identity, so that one rank may
lack what another has. A request that waits for a lookup makes all ranks look up: the entry that adds it is
the question, the length of the prefix that a rank could resume from is its answer, and the entry `Fetched`
holds what all of them have. A rank that does not answer in time makes a miss. Each rank drops what it has
found beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from continuous_batching.engine import Tier
from continuous_batching.recording.agreement import RankAnswer, RankQuestions, Settled
from continuous_batching.request import Request
from kv_cache.tier.lookup import Lookup, PageName, Sought

TIER = "tier"  # the topic of these questions; each is named by the number of lookups before it


class TierOfARank(Tier, Protocol):
    """A tier that calls a function, from any thread, when a lookup has ended."""

    def look_up(self, sought: Sought, ended: Callable[[Lookup], None] = ...) -> Lookup | None:
        """Start a lookup as `Tier.look_up` does."""
        ...


class LeadersTier:
    """The tier of the leader's engine, whose lookups end when those of all ranks have.

    The other ranks begin theirs a little later, and so have twice the time that a lookup may take, `wait_s`.
    """

    def __init__(self, tier: Tier, questions: RankQuestions, wait_s: float) -> None:
        self.hand_over, self.make, self.close = tier.hand_over, tier.make, tier.close
        self._tier, self._questions, self._wait_s = tier, questions, wait_s
        self._num_begun = 0
        self._unanswered: dict[Lookup, str] = {}  # lookups of this rank that have not ended, and their names
        self._settled: set[Lookup] = set()

    def look_up(self, sought: Sought) -> Lookup | None:
        """See `Tier.look_up`."""
        lookup = self._tier.look_up(sought)
        if lookup is not None:
            name = str(self._num_begun)
            self._num_begun += 1
            self._unanswered[lookup] = name
            self._questions.expect(TIER, name, 2 * self._wait_s, partial(self._settle, lookup))
        return lookup

    def is_over(self, lookup: Lookup) -> bool:
        """Whether all ranks have looked up, or the time for it is over."""
        if lookup in self._unanswered and self._tier.is_over(lookup):
            name = self._unanswered.pop(lookup)
            self._questions.answer(RankAnswer(TIER, name, lookup.stop))
            self._questions.take()
        if lookup not in self._settled:
            return False
        self._settled.discard(lookup)
        return True

    def _settle(self, lookup: Lookup, settled: Settled) -> None:
        self._unanswered.pop(lookup, None)
        self._settled.add(lookup)
        stops = {each.count for each in settled.answers.values()}
        # A rank that can resume later may lack what other groups of layers see from the earlier place
        is_miss = settled.problem or (lookup.sought.beside and len(stops) > 1)
        lookup.agree(None if is_miss else settled.least)


class FollowersTier:
    """The tier of a rank that follows; `answer` sends what it has found to the leader."""

    def __init__(self, tier: TierOfARank, answer: Callable[[RankAnswer], None]) -> None:
        self.close = tier.close
        self._tier, self._answer = tier, answer
        self._num_begun = 0
        self._lookups: dict[str, tuple[Request, Lookup]] = {}  # Keyed by the request that waits for it

    def look_up(self, request: Request, sought: Sought, is_waiting: Callable[[Request], bool]) -> None:
        """Start a lookup for a request that waits for all ranks' lookups, and forget those of lost ones."""
        name = str(self._num_begun)
        self._num_begun += 1
        self._lookups = {id: each for id, each in self._lookups.items() if is_waiting(each[0])}
        lookup = self._tier.look_up(sought, partial(self._ended, name))
        if lookup is None:  # the store is left alone now
            lookup = Lookup(sought, 0.0)
            self._ended(name, lookup)
        self._lookups[request.id] = request, lookup

    def hand_over(self, request: Request, taken: Sequence[PageName]) -> None:
        """Hand over the pages that all ranks use for a request, and drop the others."""
        _, lookup = self._lookups.pop(request.id)
        self._tier.is_over(lookup)  # notes that the store is too slow, if its time is over
        self._tier.hand_over([lookup.contents[page] for page in taken])

    def _ended(self, name: str, lookup: Lookup) -> None:
        self._answer(RankAnswer(TIER, name, lookup.stop))
