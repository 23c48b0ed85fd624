"""Which of several replicas should take a request?

The one where it costs least: the tokens of its prompt to be computed there after its hits, the prompt tokens
that wait there already, and a price for each request that is there. What several replicas have, as a system
prompt, costs less than what one alone has, as a conversation: it is asked for again, wherever it is. This is
asked for every request by itself; nothing switches it off for all of them. Of equal replicas each goes in
turn. A router's own sends count until the replica has told of them.

Where the pages of replicas are told, hits are those of the pages that they hold. Where not, what was sent
somewhere is taken to be found there. In both cases a page on its way counts as found, so that requests which
begin alike do not part before the first of them is computed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from continuous_batching.key_holders import Counts, KeyHolders, num_first

Route = Literal["round_robin", "least_loaded", "text_prefix", "prefix"]
ROUTES: tuple[Route, ...] = ("round_robin", "least_loaded", "text_prefix", "prefix")
MOST_SESSIONS = 2**16  # whose replica is remembered
RECENT_S = 30.0  # within which a third of what was given to a replica is still lately
MOST_SUPPOSED = 2**16  # keys a replica that are only taken to be there


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a router knows of a prompt: its length, and keys of its first parts, each of so many tokens.

    A request without one, such as for the names of models, has a length of 0.
    """

    num_tokens: int
    keys: Sequence[int] = ()
    tokens_a_key: int = 1

    def hit_tokens(self, num_keys: Counts) -> Counts:
        """Of so many first keys that are found; the last token is always computed."""
        return np.minimum(num_keys * self.tokens_a_key, max(0, self.num_tokens - 1))


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts beside the tokens of a prompt that are to be computed; `request` and `recent` in mean
    prompts, so that they suit prompts of every length.
    """

    queued: float = 0.5  # each prompt token that waits there; not 1: a hit spares those that come later, too
    shared: float = 0.5  # each token to be computed that two or more others have: the next one finds it
    request: float = 0.01  # each request there: it takes a slot, and time of every step
    recent: float = 2.5  # having been given twice as much as others of late: idle ones get their share


@dataclass(slots=True)
class Sent:
    """A request that was given to a replica."""

    replica: int
    hit_tokens: int  # that were expected there
    best_hit_tokens: int  # at the replica that has most of it
    queued_tokens: int  # to be computed; 0 once it has begun to answer
    keys: Sequence[int]  # that it will leave there
    at_s: float
    is_told: bool = False  # the replica's own figures include it
    is_ended: bool = False


@dataclass(slots=True)
class _Known:
    """Of one replica: what it told, what was sent there since, and the keys that it is taken to hold, the
    least recently sent first.
    """

    told_queued: int = 0
    told_requests: int = 0
    own_told: int = 0  # prompt tokens of what was sent there, is told of, and has not begun to answer
    own_queued: int = 0
    own_requests: int = 0
    untold: OrderedDict[int, Sent] = field(default_factory=OrderedDict)
    keys: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Routing:
    """Chooses among `count` replicas, by number. Times are the caller's, and never go back.

    A replica that `tells` its pages is believed; see the module for the others. Whoever sends a request
    elsewhere calls `ended` and routes it again.
    """

    def __init__(
        self,
        count: int,
        route: Route = "prefix",
        weights: Weights | None = None,
        *,
        tells: bool | None = None,
    ) -> None:
        self.route = route
        self.weights = weights or Weights()
        self.is_open: NDArray[np.bool_] = np.ones(count, dtype=np.bool_)  # requests may be sent there
        self.tells: NDArray[np.bool_] = np.full(count, route == "prefix" if tells is None else tells)
        self.held = KeyHolders()  # as replicas told
        self.supposed = KeyHolders()
        self._known = [_Known() for _ in range(count)]  # plain numbers: one of an array is dear to change
        self._set_loads(np.zeros((3, count)))
        self._recent_sum, self._recent_at_s = 0.0, 0.0
        self._mean_prompt, self._num_prompts = 0.0, 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._last = count - 1
        self._free: list[int] = []  # numbers of replicas that have left

    @property
    def count(self) -> int:
        return len(self.is_open)

    def _set_loads(self, loads: NDArray[np.float64]) -> None:
        """One array of what makes a replica cost more, [3, count], so that all costs are one product."""
        self._loads = loads
        self._recent = loads[0]  # tokens that it was given, fading, as of `_recent_at_s`
        self.queued_tokens = loads[1]  # of prompts, that wait in each replica, own sends included
        self.requests = loads[2]  # in each replica, own sends included

    def send(
        self, prompt: RoutedPrompt, now_s: float, session: str = "", but: Iterable[int] = ()
    ) -> Sent | None:
        """Choose a replica and count the request there; None where none is open but those in `but`.

        A session stays with its replica as long as that is open.
        """
        is_open = self.is_open
        if excluded := [*but]:
            is_open = is_open.copy()
            is_open[excluded] = False
        if not np.count_nonzero(is_open):
            return None
        self._learn(prompt, now_s)
        found, second = num_first(prompt.keys, self.count, self.held, self.supposed)
        hits = None if found is None else prompt.hit_tokens(found)
        chosen = self._sessions.get(session, -1) if session else -1
        if chosen < 0 or not is_open[chosen]:
            chosen = self._least(self._costs(hits, second * prompt.tokens_a_key), is_open)
        self._last = chosen
        if session:
            self._remember(session, chosen)
        hit = best = num_keys = 0
        if found is not None and hits is not None:
            there = hits * is_open
            hit, best, num_keys = int(hits[chosen]), int(there[there.argmax()]), int(found[chosen])
        keys = prompt.keys[num_keys:] if self.tells[chosen] else prompt.keys
        sent = Sent(chosen, hit, best, prompt.num_tokens - hit, keys, now_s)
        known = self._known[chosen]
        known.own_queued += sent.queued_tokens
        known.own_requests += 1
        known.untold[id(sent)] = sent
        self._count(chosen)
        self._recent[chosen] += sent.queued_tokens
        self._recent_sum += sent.queued_tokens
        self._suppose(chosen, keys)
        return sent

    def begun(self, sent: Sent) -> None:
        """A request has begun to answer: nothing of its prompt waits any more.

        Of what its replica told, some of it may have been computed, or found, by then. What others that were
        told of still need is left, so far as so much was told.
        """
        if sent.queued_tokens:
            known = self._known[sent.replica]
            if sent.is_told:
                told = known.told_queued
                known.own_told -= sent.queued_tokens
                known.told_queued = max(told - sent.queued_tokens, min(told, known.own_told))
            else:
                known.own_queued -= sent.queued_tokens
            sent.queued_tokens = 0
            self._count(sent.replica)

    def ended(self, sent: Sent) -> None:
        """A request has ended, in whatever way. What it left in a replica that tells is told by now."""
        if sent.is_ended:
            return
        self.begun(sent)
        sent.is_ended = True
        known = self._known[sent.replica]
        if sent.is_told:
            known.told_requests = max(0, known.told_requests - 1)
        else:
            known.own_requests -= 1
            del known.untold[id(sent)]
        self._count(sent.replica)
        if self.tells[sent.replica]:
            self._unsuppose(sent.replica, sent.keys)

    def told(self, replica: int, queued_tokens: int, requests: int, as_of_s: float) -> None:
        """What a replica says waits and is there; it had by then what was sent before `as_of_s`."""
        known = self._known[replica]
        known.told_queued, known.told_requests = queued_tokens, requests
        while known.untold and (first := next(iter(known.untold.values()))).at_s <= as_of_s:
            del known.untold[id(first)]
            first.is_told = True
            known.own_queued -= first.queued_tokens
            known.own_told += first.queued_tokens
            known.own_requests -= 1
        self._count(replica)

    def stored(self, replica: int, keys: Iterable[int]) -> int:
        """A replica tells that it holds these pages; return how many of them are new."""
        return self.held.add(replica, keys)

    def removed(self, replica: int, keys: Iterable[int]) -> int:
        """A replica tells that it does not hold these pages any more; return how many of them it held."""
        return self.held.discard(replica, keys)

    def cleared(self, replica: int) -> None:
        """A replica holds no page: it is new, or all that follows is told anew."""
        self.held.clear(replica)

    def lost(self, replica: int) -> None:
        """A replica is gone with all that it held and was at."""
        self.cleared(replica)
        known = self._known[replica]
        self._unsuppose(replica, [*known.keys])
        for sent in [*known.untold.values()]:
            self.ended(sent)
        known.told_queued = known.told_requests = 0
        self._count(replica)
        for session in [each for each, at in self._sessions.items() if at == replica]:
            del self._sessions[session]

    def join(self) -> int:
        """A replica more, closed at first; its number, which one that has left may have had."""
        if self._free:
            return self._free.pop()
        self.is_open, self.tells = np.append(self.is_open, False), np.append(self.tells, False)
        self._set_loads(np.append(self._loads, np.zeros((3, 1)), axis=1))
        self._known.append(_Known())
        return self.count - 1

    def leave(self, replica: int) -> None:
        """A replica that nothing is at any more is gone for good: its number may become another's."""
        self.lost(replica)
        self.is_open[replica] = self.tells[replica] = False
        self._recent_sum -= self._recent[replica]
        self._recent[replica] = 0.0
        self._free.append(replica)

    def num_found(self, keys: Sequence[int]) -> Counts:
        """How many of these keys, from the first on without a gap, each replica has."""
        found, _ = num_first(keys, self.count, self.held, self.supposed)
        return np.zeros(self.count, dtype=np.int64) if found is None else found

    def _count(self, replica: int) -> None:
        """What a replica told, or what was sent there, has changed."""
        known = self._known[replica]
        self.queued_tokens[replica] = known.told_queued + known.own_queued
        self.requests[replica] = known.told_requests + known.own_requests

    def _costs(self, hits: Counts | None, second: int) -> NDArray[np.float64]:
        """What a request costs in each replica beyond its own tokens, in prompt tokens; by counts alone, in
        requests. `second` of its tokens are found in two replicas or more.
        """
        if self.route == "round_robin":
            return np.zeros(self.count)
        if self.route == "least_loaded":
            return np.array(self.requests)
        weights, mean = self.weights, self._mean_prompt
        usual = self._recent_sum / max(1, self.count - len(self._free)) + _FEW_PROMPTS * mean
        recent = weights.recent * mean / max(1.0, usual)
        costs: NDArray[np.float64] = np.array((recent, weights.queued, weights.request * mean)) @ self._loads
        if hits is not None and second and self.count > _FEWEST_SHARE:
            costs -= np.maximum(hits, hits * weights.shared + second * (1 - weights.shared))
        elif hits is not None:
            costs -= hits
        return costs

    def _learn(self, prompt: RoutedPrompt, now_s: float) -> None:
        """A prompt came: how long they are in the mean, and what is not of late any more."""
        if prompt.num_tokens:
            self._num_prompts = min(self._num_prompts + 1, _MANY_PROMPTS)
            self._mean_prompt += (prompt.num_tokens - self._mean_prompt) / self._num_prompts
        fade = math.exp((self._recent_at_s - now_s) / RECENT_S)
        self._recent *= fade
        self._recent_sum *= fade
        self._recent_at_s = now_s

    def _least(self, costs: NDArray[np.float64], is_open: NDArray[np.bool_]) -> int:
        """The open replica of the least cost; of several the next after the last one that was chosen."""
        costs = np.where(is_open, costs, np.inf)
        least, after = int(costs.argmin()), self._last + 1
        if least < after < len(costs):
            later = after + int(costs[after:].argmin())
            return later if costs[later] == costs[least] else least
        return least

    def _remember(self, session: str, replica: int) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def _suppose(self, replica: int, keys: Sequence[int]) -> None:
        """Pages that were sent for are on their way, and the first of a chain are forgotten last."""
        known = self._known[replica].keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        self.supposed.add(replica, keys)
        if len(known) > MOST_SUPPOSED:
            self.supposed.discard(
                replica, [known.popitem(last=False)[0] for _ in range(len(known) - MOST_SUPPOSED)]
            )

    def _unsuppose(self, replica: int, keys: Sequence[int]) -> None:
        known = self._known[replica].keys
        for key in keys:
            known.pop(key, None)
        self.supposed.discard(replica, keys)


_FEWEST_SHARE = 2  # of two replicas, what both have is missed nowhere
_FEW_PROMPTS = 4  # of recent work tell nothing yet of who has too much
_MANY_PROMPTS = 1000  # over which the mean goes
