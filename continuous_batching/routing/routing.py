"""Choose the replica that should take a request.

The request goes where it costs least: the tokens of its prompt to be computed there after its prefix hits,
the prompt tokens that already wait there, and a price for each request that runs there. A hit in a prefix
that several replicas hold, such as a system prompt, counts less than in a prefix that only one holds, such as
a conversation, because the shared prefix is found elsewhere too. Each request is weighed on its own; equal
replicas take turns. What the router has sent to a replica counts until the replica's own figures include it.

If replicas report their pages, hits are counted in the pages that they hold. If they do not, whatever was
sent to a replica is assumed to be found there. In both cases a page that is being computed counts as found,
so that requests with a common prefix are not separated before the first of them is computed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
_FEW = 8


class KeyHolders:
    """The replicas that hold each key, as one bit for each replica."""

    def __init__(self) -> None:
        # Replicas that hold the key, as bits; a key that no replica holds has no entry
        self.masks: dict[int, int] = {}
        self._num_keys = Counter[int]()  # number of keys of each replica

    def __len__(self) -> int:
        return len(self.masks)

    def __contains__(self, key: int) -> bool:
        return key in self.masks

    def add(self, replica: int, keys: Iterable[int]) -> int:
        """Add keys to a replica; return how many of them are new to it."""
        bit, masks, num_new = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
                num_new += 1
        self._num_keys[replica] += num_new
        return num_new

    def discard(self, replica: int, keys: Iterable[int]) -> int:
        """Remove keys from a replica; return how many of them it had."""
        bit, masks, num_gone = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                num_gone += 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit
        self._num_keys[replica] -= num_gone
        return num_gone

    def clear(self, replica: int) -> None:
        """Remove all keys of a replica; those of all replicas are looked at where it has any."""
        if not self._num_keys[replica]:
            return
        bit = 1 << replica
        self.discard(replica, [key for key, mask in self.masks.items() if mask & bit])


def num_first(
    keys: Sequence[int], count: int, held: KeyHolders, supposed: KeyHolders
) -> tuple[Counts | None, int]:
    """Return how many leading keys each of `count` replicas holds, and the runner-up's number.

    A key counts if it is in `held` or in `supposed`; there must be no gap. The counts are None if no replica
    holds the first key. The second value is the largest number of leading keys that at least two replicas
    hold.
    """
    one, other = held.masks.get, supposed.masks.get
    there = one(keys[0], 0) | other(keys[0], 0) if len(keys) else 0
    if not there:
        return None, 0
    found, second = np.zeros(count, dtype=np.int64), 0
    for number, key in enumerate(keys):
        still = there & (one(key, 0) | other(key, 0))
        if still != there:
            _put(found, there ^ still, number)
            second = number if there & (there - 1) else second
            there = still
            if not there:
                return found, second
    _put(found, there, len(keys))
    return found, len(keys) if there & (there - 1) else second


def _put(counts: Counts, mask: int, value: int) -> None:
    """Set the count of each replica whose bit is set in `mask`."""
    if mask.bit_count() <= _FEW:  # a loop is faster for few replicas
        while mask:
            number = mask.bit_length() - 1
            counts[number] = value
            mask ^= 1 << number
        return
    bits = np.frombuffer(mask.to_bytes(-(-len(counts) // 8), "little"), dtype=np.uint8)
    counts[np.unpackbits(bits, count=len(counts), bitorder="little").astype(np.bool_)] = value


Route = Literal["round_robin", "least_loaded", "text_prefix", "prefix"]
ROUTES: tuple[Route, ...] = ("round_robin", "least_loaded", "text_prefix", "prefix")
MOST_SESSIONS = 2**16  # sessions whose replica is remembered
RECENT_S = 30.0  # time after which the tokens given to a replica count as 1/e of what they did
MOST_SUPPOSED = 2**16  # keys per replica that are only assumed to be there


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What the router knows of a prompt: its length, and the keys of its leading parts.

    Each key stands for `tokens_a_key` tokens. A request without a prompt, such as one for the names of
    models, has a length of 0.
    """

    num_tokens: int
    keys: Sequence[int] = ()
    tokens_a_key: int = 1

    def hit_tokens(self, num_keys: Counts) -> Counts:
        """Return the hit tokens of so many leading keys; the last token of a prompt is always computed."""
        return np.minimum(num_keys * self.tokens_a_key, max(0, self.num_tokens - 1))


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the costs besides the prompt tokens to be computed.

    `request` and `recent` are in units of the mean prompt, so that they suit prompts of every length.
    """

    # Each prompt token that waits there. It is below 1 because a hit also spares the requests that come
    # later.
    queued: float = 0.5
    # Each token to be computed that two or more other replicas hold, because the next request finds it there.
    shared: float = 0.5
    request: float = 0.01  # Each request there, which takes a slot and time of every step.
    # Having recently been given twice as much as the others, so that idle replicas get their share.
    recent: float = 2.5


@dataclass(slots=True)
class Sent:
    """A request that was sent to a replica."""

    replica: int
    hit_tokens: int  # hit tokens expected there
    best_hit_tokens: int  # hit tokens at the replica that holds most of its prompt
    queued_tokens: int  # prompt tokens to be computed; 0 once the answer has begun
    keys: Sequence[int]  # keys that the request will leave there
    at_s: float
    is_reported: bool = False  # the replica's own figures include it
    is_ended: bool = False


@dataclass(slots=True)
class _Known:
    """What is known of one replica: its figures, what was sent since, and the keys assumed to be there.

    The keys are ordered by the time they were last sent for, the oldest first.
    """

    reported_queued: int = 0
    reported_requests: int = 0
    # Prompt tokens sent there that its figures include and whose answers have not begun
    own_reported: int = 0
    own_queued: int = 0
    own_requests: int = 0
    unreported: OrderedDict[int, Sent] = field(default_factory=OrderedDict)
    keys: OrderedDict[int, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class PagesOfWindow:
    """The pages of layers that see a window, which a replica reports beside those of all tokens.

    Recurrent states are such pages, too: of a prefix the query behind it needs the last one alone.
    """

    window: int  # tokens that a query sees; 0 of states
    keys: set[int] = field(default_factory=set)

    @property
    def num_before(self) -> int:
        """The tokens before a query's own that it sees."""
        return self.window - 1 if self.window else 1


class Routing:
    """Chooses among `count` replicas, by number. Times come from the caller and never go back.

    A replica that `tells` its pages is believed; the module's docstring says how the others are treated. A
    caller that sends a request elsewhere calls `ended` and routes it again.
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
        self.is_open: NDArray[np.bool_] = np.ones(count, dtype=np.bool_)  # replicas that may be sent requests
        self.tells: NDArray[np.bool_] = np.full(count, route == "prefix" if tells is None else tells)
        self.held = KeyHolders()  # keys that replicas reported
        self.supposed = KeyHolders()
        self._beside: dict[int, dict[int, PagesOfWindow]] = {}  # keyed by replica, then by group
        # Kept as plain numbers, because changing an element of an array is slow
        self._known = [_Known() for _ in range(count)]
        self._set_loads(np.zeros((3, count)))
        self._recent_sum, self._recent_at_s = 0.0, 0.0
        self._mean_prompt, self._num_prompts = 0.0, 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._last = count - 1
        self._free: list[int] = []  # numbers of replicas that have left, for reuse

    @property
    def count(self) -> int:
        return len(self.is_open)

    def _set_loads(self, loads: NDArray[np.float64]) -> None:
        """Set the loads that make a replica cost more, as one array [3, count].

        All costs are then one product.
        """
        self._loads = loads
        self._recent = loads[0]  # tokens given to each replica, decayed to `_recent_at_s`
        self.queued_tokens = loads[1]  # prompt tokens that wait in each replica, own sends included
        self.requests = loads[2]  # requests in each replica, own sends included

    def send(
        self, prompt: RoutedPrompt, now_s: float, session: str = "", but: Iterable[int] = ()
    ) -> Sent | None:
        """Choose a replica and count the request there; return None if none is open except those in `but`.

        A session stays with its replica as long as that is open.
        """
        is_open = self.is_open
        if excluded := [*but]:
            is_open = is_open.copy()
            is_open[excluded] = False
        if not np.count_nonzero(is_open):
            return None
        self._learn(prompt, now_s)
        found, second = self._first(prompt.keys, prompt.tokens_a_key)
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
        known.unreported[id(sent)] = sent
        self._count(chosen)
        self._recent[chosen] += sent.queued_tokens
        self._recent_sum += sent.queued_tokens
        self._suppose(chosen, keys)
        return sent

    def begun(self, sent: Sent) -> None:
        """Note that a request has begun to answer, so that none of its prompt waits any more.

        Some of its tokens may have left the replica's reported figure already. The figure is therefore
        reduced no further than to what the other requests that it includes still need.
        """
        if sent.queued_tokens:
            known = self._known[sent.replica]
            if sent.is_reported:
                reported = known.reported_queued
                known.own_reported -= sent.queued_tokens
                known.reported_queued = max(reported - sent.queued_tokens, min(reported, known.own_reported))
            else:
                known.own_queued -= sent.queued_tokens
            sent.queued_tokens = 0
            self._count(sent.replica)

    def ended(self, sent: Sent) -> None:
        """Note that a request has ended, in whatever way.

        A replica that reports its pages has reported this one's.
        """
        if sent.is_ended:
            return
        self.begun(sent)
        sent.is_ended = True
        known = self._known[sent.replica]
        if sent.is_reported:
            known.reported_requests = max(0, known.reported_requests - 1)
        else:
            known.own_requests -= 1
            del known.unreported[id(sent)]
        self._count(sent.replica)
        if self.tells[sent.replica]:
            self._unsuppose(sent.replica, sent.keys)

    def report_load(self, replica: int, queued_tokens: int, requests: int, as_of_s: float) -> None:
        """Take a replica's own figures, which include what was sent to it before `as_of_s`."""
        known = self._known[replica]
        known.reported_queued, known.reported_requests = queued_tokens, requests
        while known.unreported and (first := next(iter(known.unreported.values()))).at_s <= as_of_s:
            del known.unreported[id(first)]
            first.is_reported = True
            known.own_queued -= first.queued_tokens
            known.own_reported += first.queued_tokens
            known.own_requests -= 1
        self._count(replica)

    def believe(self, replica: int) -> None:
        """Believe a replica's reports from now on, and no more what was assumed to be there."""
        if not self.tells[replica]:
            self._unsuppose(replica, [*self._known[replica].keys])
        self.tells[replica] = True

    def stored(self, replica: int, keys: Iterable[int]) -> int:
        """Add pages that a replica reports to hold; return how many of them are new."""
        return self.held.add(replica, keys)

    def removed(self, replica: int, keys: Iterable[int]) -> int:
        """Remove pages that a replica reports to have dropped; return how many of them it held."""
        return self.held.discard(replica, keys)

    def stored_beside(self, replica: int, keys: Iterable[int], group: int, window: int) -> int:
        """Add pages of layers that see a window of so many tokens, or states; return how many are new."""
        pages = self._beside.setdefault(replica, {}).setdefault(group, PagesOfWindow(window))
        before = len(pages.keys)
        pages.keys.update(keys)
        return len(pages.keys) - before

    def removed_beside(self, replica: int, keys: Iterable[int], group: int) -> int:
        """Remove pages of a window that a replica has dropped; return how many of them it held."""
        pages = self._beside.get(replica, {}).get(group)
        if pages is None:
            return 0
        before = len(pages.keys)
        pages.keys.difference_update(keys)
        return before - len(pages.keys)

    def cleared(self, replica: int) -> None:
        """Remove all reported pages of a replica: it is new, or a full report follows."""
        self.held.clear(replica)
        self._beside.pop(replica, None)

    def lost(self, replica: int) -> None:
        """Drop everything known of a replica that has failed."""
        self.cleared(replica)
        known = self._known[replica]
        self._unsuppose(replica, [*known.keys])
        for sent in [*known.unreported.values()]:
            self.ended(sent)
        known.reported_queued = known.reported_requests = 0
        self._count(replica)
        for session in [each for each, at in self._sessions.items() if at == replica]:
            del self._sessions[session]

    def join(self) -> int:
        """Add a replica, closed at first; return its number, which may be that of one that has left."""
        if self._free:
            return self._free.pop()
        self.is_open, self.tells = np.append(self.is_open, False), np.append(self.tells, False)
        self._set_loads(np.append(self._loads, np.zeros((3, 1)), axis=1))
        self._known.append(_Known())
        return self.count - 1

    def leave(self, replica: int) -> None:
        """Remove an idle replica for good; its number may be given to another."""
        self.lost(replica)
        self.is_open[replica] = self.tells[replica] = False
        self._recent_sum -= self._recent[replica]
        self._recent[replica] = 0.0
        self._free.append(replica)

    def num_found(self, keys: Sequence[int], tokens_a_key: int = 1) -> Counts:
        """Return how many of these leading keys each replica can resume from."""
        found, _ = self._first(keys, tokens_a_key)
        return np.zeros(self.count, dtype=np.int64) if found is None else found

    def _first(self, keys: Sequence[int], tokens_a_key: int) -> tuple[Counts | None, int]:
        """Return what `num_first` does, cut back to where each replica has what its windows see."""
        found, second = num_first(keys, self.count, self.held, self.supposed)
        if found is None or not self._beside:
            return found, second
        for replica, groups in self._beside.items():
            count = int(found[replica])
            if count:
                found[replica] = self._resumable(replica, keys[:count], tokens_a_key, groups.values())
        return found, int(np.partition(found, -2)[-2]) if self.count > 1 else 0

    def _resumable(
        self, replica: int, keys: Sequence[int], tokens_a_key: int, groups: Collection[PagesOfWindow]
    ) -> int:
        """Return how many of these keys, which a replica holds, it can resume from."""
        bit, supposed, size = 1 << replica, self.supposed.masks, tokens_a_key
        stop = at = len(keys)
        while at and any(at * size > stop * size - each.num_before for each in groups):
            at -= 1
            key = keys[at]
            if supposed.get(key, 0) & bit:
                continue
            for each in groups:
                is_seen = (at + 1) * size > stop * size - each.num_before
                if is_seen and key not in each.keys:
                    stop = at
                    break
        return stop

    def _count(self, replica: int) -> None:
        """Recompute a replica's loads after its figures or own sends have changed."""
        known = self._known[replica]
        self.queued_tokens[replica] = known.reported_queued + known.own_queued
        self.requests[replica] = known.reported_requests + known.own_requests

    def _costs(self, hits: Counts | None, second: int) -> NDArray[np.float64]:
        """Return the cost of a request in each replica, less its hit tokens, in prompt tokens.

        For the routes that only count, the cost is in requests. `second` of its tokens are found in two
        replicas or more.
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
        """Update the mean prompt length, and decay the recent loads to `now_s`."""
        if prompt.num_tokens:
            self._num_prompts = min(self._num_prompts + 1, _MANY_PROMPTS)
            self._mean_prompt += (prompt.num_tokens - self._mean_prompt) / self._num_prompts
        fade = math.exp((self._recent_at_s - now_s) / RECENT_S)
        self._recent *= fade
        self._recent_sum *= fade
        self._recent_at_s = now_s

    def _least(self, costs: NDArray[np.float64], is_open: NDArray[np.bool_]) -> int:
        """Return the open replica of the least cost; of equal ones, the next after the last one chosen."""
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
        """Assume the pages of a request to be on its replica.

        The first pages of a chain are forgotten last.
        """
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


_FEWEST_SHARE = 2  # a prefix that two of two replicas hold is missing nowhere
_FEW_PROMPTS = 4  # mean prompts of recent work, below which the load of one replica says little
_MANY_PROMPTS = 1000  # prompts over which the mean is taken
