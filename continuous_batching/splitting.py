"""Should another replica compute a request's prompt, and which?

Where that is predicted to cost less, in prompt tokens: there, what waits before it, what is to be computed
after its hits, and the way of the pages; here, the same without a way, but every answer that runs beside a
prompt is slowed by it. So short prompts stay, and those that are found where they are answered, and all where
nothing else runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from continuous_batching.routing import RoutedPrompt, Routing, Sent

Split = Literal["cost", "always", "never"]
PROMPT_REPLICA_HEADER = "x-prompt-replica"  # of a request: the endpoint of who computes its prompt
SPLITS: tuple[Split, ...] = ("cost", "always", "never")


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """What a split costs and spares, in prompt tokens that are computed in the time of it.

    They are guesses, fitted to no machine: times of steps give what an answer loses beside a prompt, and not
    how much of that a sooner first token is worth. docs/fleet.md has those of a simulated device, and what
    other weights change there.
    """

    transfer: float = 32.0  # the beginning and the end of a transfer
    page_token: float = 0.1  # the way of the pages of a token, as far as it is not hidden behind computing
    answer: float = 0.05  # of each prompt token, for each request that is there: what its answer loses


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """Where a prompt is computed, and how the engine that answers reaches it."""

    sent: Sent
    endpoint: str


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """Where a prompt is computed, None: where it is answered; and the costs that were compared, in prompt
    tokens, None where nobody else could compute it or it was not asked what it costs.
    """

    place: PromptPlace | None = None
    cost_here: float | None = None
    cost_there: float | None = None


_NO_SPLIT = SplitChoice()


class Splitting:
    """Chooses among the replicas of a routing that compute prompts for others: those with an endpoint."""

    def __init__(self, routing: Routing, split: Split = "cost", weights: SplitWeights | None = None) -> None:
        self._routing = routing
        self._split = split
        self._weights = weights or SplitWeights()
        self._endpoint_of: dict[int, str] = {}
        self._sources_of: dict[int, frozenset[str]] = {}
        self._slots_of: dict[int, int] = {}

    def is_known(self, replica: int, endpoint: str, sources: Iterable[str], slots: int) -> None:
        """Where a replica computes prompts for others ("": nowhere), who computes some for it, and how many
        requests it runs at once (0: nobody knows).
        """
        if endpoint:
            self._endpoint_of[replica] = endpoint
        else:
            self._endpoint_of.pop(replica, None)
        self._sources_of[replica] = frozenset(sources)
        self._slots_of[replica] = slots

    @property
    def not_for_answers(self) -> list[int]:
        """Replicas that get no whole request now: those that compute prompts for others, where another is
        open that has a slot. Where none has, those that have none either; "always" keeps them all apart.
        """
        if not self._endpoint_of or self._split == "never":
            return []
        is_open = self._routing.is_open.copy()
        ours = [*self._endpoint_of]
        is_open[ours] = False
        others = np.flatnonzero(is_open).tolist()
        if not others:
            return []
        if self._split == "always" or any(self._has_slot(each) for each in others):
            return ours
        return [each for each in ours if not self._has_slot(each)]

    def choose(self, prompt: RoutedPrompt, sent: Sent, now_s: float) -> SplitChoice:
        """Who computes the prompt of a request that was sent to a replica, and is counted there from now
        on.
        """
        if not self._endpoint_of:
            return _NO_SPLIT
        places = self._places(sent.replica)
        to_compute = prompt.num_tokens - sent.hit_tokens
        if self._split == "never" or not places or to_compute <= prompt.tokens_a_key:
            return _NO_SPLIT
        place = min(places, key=lambda each: self._cost_at(each, prompt, to_compute))
        cost_here, cost_there = self._cost_here(sent), self._cost_at(place, prompt, to_compute)
        if self._split == "cost" and cost_there >= cost_here:
            return SplitChoice(None, cost_here, cost_there)
        others = np.flatnonzero(np.arange(self._routing.count) != place).tolist()
        there = self._routing.send(prompt, now_s, but=others)
        assert there is not None, "an open replica was chosen"
        self._routing.begun(sent)  # nothing of it waits to be computed here
        return SplitChoice(PromptPlace(there, self._endpoint_of[place]), cost_here, cost_there)

    def _has_slot(self, replica: int) -> bool:
        slots = self._slots_of.get(replica, 0)
        return not slots or int(self._routing.requests[replica]) < slots

    def _places(self, replica: int) -> list[int]:
        sources, is_open = self._sources_of.get(replica, frozenset()), self._routing.is_open
        return [at for at, each in self._endpoint_of.items() if each in sources and is_open[at]]

    def _cost_at(self, place: int, prompt: RoutedPrompt, num_moved: int) -> float:
        routing, weights = self._routing, self._weights
        hits = int(prompt.hit_tokens(routing.num_found(prompt.keys))[place])
        waits = routing.weights.queued * int(routing.queued_tokens[place])
        return waits + prompt.num_tokens - hits + weights.transfer + weights.page_token * num_moved

    def _cost_here(self, sent: Sent) -> float:
        routing = self._routing
        before = int(routing.queued_tokens[sent.replica]) - sent.queued_tokens
        others = int(routing.requests[sent.replica]) - 1
        return routing.weights.queued * before + sent.queued_tokens * (1 + self._weights.answer * others)
