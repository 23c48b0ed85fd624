"""Decide whether another replica should compute a request's prompt, and which.

It should if its predicted cost, in prompt tokens, is lower. The cost there is what waits before the prompt,
what is to be computed after its hits, and the transfer of the pages. The cost here has no transfer, but every
answer that runs beside a prompt is slowed by it. So short prompts stay, as do those whose pages are found
where they are answered, and all of them where nothing else runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from continuous_batching.routing.routing import RoutedPrompt, Routing, Sent

Split = Literal["cost", "always", "never"]
# Request header with the endpoint of the engine that computes the prompt
PROMPT_REPLICA_HEADER = "x-prompt-replica"
SPLITS: tuple[Split, ...] = ("cost", "always", "never")


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """The costs and savings of a split, in prompt tokens that could be computed in the same time.

    The values are guesses that were fitted to no machine: the times of steps give what an answer loses beside
    a prompt, but not what a sooner first token is worth. docs/measured/fleet.md has the values of a
    simulated device, and the effect of other weights there.
    """

    transfer: float = 32.0  # cost of beginning and ending a transfer
    # Cost of moving the pages of one token, as far as it is not hidden behind computation
    page_token: float = 0.1
    # What each prompt token costs the answer of each other request on the replica
    answer: float = 0.05


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """The replica that computes a prompt, and its endpoint for the engine that answers."""

    sent: Sent
    endpoint: str


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The decision about one prompt: its place (None: where it is answered), and the costs compared.

    Costs are in prompt tokens; they are None if no other replica could compute the prompt or no comparison
    was made.
    """

    place: PromptPlace | None = None
    cost_here: float | None = None
    cost_there: float | None = None


_NO_SPLIT = SplitChoice()


class Splitting:
    """Chooses among the replicas that compute prompts for others, which are those with an endpoint."""

    def __init__(self, routing: Routing, split: Split = "cost", weights: SplitWeights | None = None) -> None:
        self._routing = routing
        self._split = split
        self._weights = weights or SplitWeights()
        self._endpoint_of: dict[int, str] = {}
        self._sources_of: dict[int, frozenset[str]] = {}
        self._slots_of: dict[int, int] = {}

    def is_known(self, replica: int, endpoint: str, sources: Iterable[str], slots: int) -> None:
        """Note a replica's endpoint for prompts ("": none), its prompt sources and its slots (0: unknown)."""
        if endpoint:
            self._endpoint_of[replica] = endpoint
        else:
            self._endpoint_of.pop(replica, None)
        self._sources_of[replica] = frozenset(sources)
        self._slots_of[replica] = slots

    @property
    def not_for_answers(self) -> list[int]:
        """Replicas that get no whole request now, because they compute prompts for others.

        This holds while another open replica has a free slot; if none has, only those without a free slot are
        excluded. With "always" they are all kept apart.
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

    def choose(self, prompt: RoutedPrompt, sent: Sent, now_s: float, but: Sequence[int] = ()) -> SplitChoice:
        """Choose where the prompt of a request is computed, and count it there from now on.

        The replicas in `but` lack the request's model or adapter.
        """
        if not self._endpoint_of:
            return _NO_SPLIT
        places = [each for each in self._places(sent.replica) if each not in but]
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
        self._routing.begun(sent)  # none of its prompt is to be computed here
        return SplitChoice(PromptPlace(there, self._endpoint_of[place]), cost_here, cost_there)

    def _has_slot(self, replica: int) -> bool:
        slots = self._slots_of.get(replica, 0)
        return not slots or int(self._routing.requests[replica]) < slots

    def _places(self, replica: int) -> list[int]:
        sources, is_open = self._sources_of.get(replica, frozenset()), self._routing.is_open
        return [at for at, each in self._endpoint_of.items() if each in sources and is_open[at]]

    def _cost_at(self, place: int, prompt: RoutedPrompt, num_moved: int) -> float:
        routing, weights = self._routing, self._weights
        hits = int(prompt.hit_tokens(routing.num_found(prompt.keys, prompt.tokens_a_key))[place])
        waits = routing.weights.queued * int(routing.queued_tokens[place])
        return waits + prompt.num_tokens - hits + weights.transfer + weights.page_token * num_moved

    def _cost_here(self, sent: Sent) -> float:
        routing = self._routing
        before = int(routing.queued_tokens[sent.replica]) - sent.queued_tokens
        others = int(routing.requests[sent.replica]) - 1
        return routing.weights.queued * before + sent.queued_tokens * (1 + self._weights.answer * others)
