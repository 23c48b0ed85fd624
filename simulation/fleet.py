"""Simulate many engines behind a router that serve a trace.

The router is the one that serves (`continuous_batching.routing.routing`). It learns of pages as they are
stored and removed, of loads as often as servers tell them, and sees when a request begins to answer and has
ended.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from continuous_batching.inspection import queued_tokens
from continuous_batching.request import Request
from continuous_batching.routing.routing import Route, RoutedPrompt, Routing, Sent
from kv_cache.page_keys import TokenIds, page_keys, short_key
from kv_cache.prefix_cache import PageListener
from simulation.replica import Replica, in_order

BEAT_S = 0.25  # interval at which a replica reports its load, as in `serving.engine.worker`


@dataclass(slots=True)
class Routed:
    """The router's expectations, summed over requests, and the resulting load of each engine."""

    prompt_tokens: int = 0
    hit_tokens: int = 0  # hit tokens expected where the requests were sent
    best_hit_tokens: int = 0  # hit tokens expected where most would have been found
    requests: list[int] | None = None  # number of requests sent to each engine
    # Tokens that each engine computes for them: prompts after hits, and answers
    tokens: list[int] | None = None

    def count(self, request: Request, sent: Sent, num_replicas: int) -> None:
        """Count a request that was sent."""
        self.requests = self.requests or [0] * num_replicas
        self.tokens = self.tokens or [0] * num_replicas
        self.prompt_tokens += request.num_prompt_tokens
        self.hit_tokens += sent.hit_tokens
        self.best_hit_tokens += sent.best_hit_tokens
        self.requests[sent.replica] += 1
        self.tokens[sent.replica] += sent.queued_tokens + request.params.max_tokens

    def figures(self) -> dict[str, float]:
        """Return the share of the best hits that was kept, and the highest over the mean load."""
        tokens = self.tokens or [0]
        return {
            "routed_hits_of_best": round(self.hit_tokens / max(1, self.best_hit_tokens), 4),
            "routed_most_of_mean": round(max(tokens) / max(1.0, sum(tokens) / len(tokens)), 4),
        }


class _PageReporter(PageListener):
    """Reports the pages of one engine to a router."""

    def __init__(self, routing: Routing, number: int) -> None:
        self._routing = routing
        self._number = number

    def stored(self, keys: Sequence[bytes], tokens: TokenIds, before: bytes | None, salt: str) -> None:
        self._routing.stored(self._number, map(short_key, keys))

    def removed(self, keys: Sequence[bytes]) -> None:
        self._routing.removed(self._number, map(short_key, keys))

    def stored_beside(self, keys: Sequence[bytes], group: int, window: int) -> None:
        self._routing.stored_beside(self._number, map(short_key, keys), group, window)

    def removed_beside(self, keys: Sequence[bytes], group: int) -> None:
        self._routing.removed_beside(self._number, map(short_key, keys), group)


@dataclass(frozen=True, slots=True)
class Passing:
    """A request that the router has sent on, and whose answer has not entirely passed through it."""

    request: Request
    sent: Sent
    prompt: Sent | None = None  # the place where its prompt is computed, if elsewhere


class Fleet:
    """Engines behind a router. Each is simulated only up to the last arrival that it or the router sees."""

    def __init__(self, replicas: Sequence[Replica], routing: Routing) -> None:
        self.replicas = replicas
        self.routing = routing
        self.routed = Routed()
        self._looks = routing.route != "round_robin"  # whether the router needs the engines' loads
        self._has_keys = routing.route == "text_prefix" or bool(routing.tells.any())
        for number in routing.tells.nonzero()[0].tolist():
            prefix = replicas[number].engine.scheduler.prefix
            prefix.listener = _PageReporter(routing, number)
            for found in prefix.everything_beside():  # nothing yet, of groups without which no page is a hit
                prefix.listener.stored_beside(*found)
        self._reported_s = np.full(len(replicas), -math.inf)
        # Clocks of the engines with work, if the router needs loads
        self._behind: list[tuple[float, int]] = []
        self._is_behind = np.zeros(len(replicas), dtype=np.bool_)
        self._passing: list[list[Passing]] = [[] for _ in replicas]

    def add(self, request: Request, at_s: float) -> None:
        """Route a request to an engine, at a time not before that of the last request."""
        if self._looks:
            self._catch_up(at_s)
        sent = self.routing.send(self._prompt(request), at_s)
        assert sent is not None, "all engines are open"
        self.routed.count(request, sent, len(self.replicas))
        number = sent.replica
        replica = self.replicas[number]
        replica.advance(at_s)
        replica.add(request)
        if not self._looks:
            self.routing.ended(sent)  # round robin counts and keeps nothing
            return
        self._passing[number].append(Passing(request, sent))
        if not self._is_behind[number]:
            self._is_behind[number] = True
            heapq.heappush(self._behind, (replica.clock.now_s, number))

    def advance(self, until_s: float) -> None:
        """Advance all engines to this time."""
        for replica in self.replicas:
            replica.advance(until_s)

    def serve(self, trace: Iterable[Request]) -> None:
        """Serve requests, in order of arrival, to the end."""
        for request in in_order(trace):
            self.add(request, request.arrival_s)
        self.close()

    def close(self) -> None:
        """Serve all requests to their end."""
        self.advance(math.inf)
        for number, replica in enumerate(self.replicas):
            self._see(number, math.inf)
            replica.counter.close()

    def _prompt(self, request: Request) -> RoutedPrompt:
        slots = self.replicas[0].engine.slots
        if not self._has_keys:
            return RoutedPrompt(request.num_prompt_tokens)
        request.page_keys = page_keys(request.prompt, slots.page_size, request.cache_salt, request.page_keys)
        keys = [short_key(key) for key in request.page_keys]
        return RoutedPrompt(request.num_prompt_tokens, keys, slots.page_size)

    def _catch_up(self, until_s: float) -> None:
        while self._behind and self._behind[0][0] < until_s:
            _, number = self._behind[0]
            replica = self.replicas[number]
            replica.advance(until_s)
            self._see(number, until_s)
            self._tell(number, until_s)
            if replica.engine.has_work or self._passing[number]:  # its last step may end later
                heapq.heapreplace(self._behind, (replica.clock.now_s, number))
            else:
                heapq.heappop(self._behind)
                self._is_behind[number] = False

    def _see(self, number: int, now_s: float) -> None:
        """Tell the router which of an engine's answers have begun or ended by now.

        This corresponds to the proxy of `serving.router`.
        """
        still = []
        for each in self._passing[number]:
            request = each.request
            is_over = request.finish_reason is not None and (request.finish_s or 0.0) <= now_s
            if is_over or (request.first_token_s is not None and request.first_token_s <= now_s):
                self.routing.begun(each.sent)
                if each.prompt is not None:
                    self.routing.ended(each.prompt)
            if is_over:
                self.routing.ended(each.sent)
            else:
                still.append(each)
        self._passing[number] = still

    def _tell(self, number: int, now_s: float) -> None:
        """Report an engine's load to the router, once a beat while it has work and at once when it has none.

        The work of the engine's last step counts as undone until that step ends, which may be later than now.
        """
        replica, passing = self.replicas[number], self._passing[number]
        if replica.engine.has_work and now_s < self._reported_s[number] + BEAT_S:
            return
        self._reported_s[number] = now_s
        computing = [each.sent for each in passing if (each.request.first_token_s or 0.0) > now_s]
        ending = sum(each.request.finish_reason is not None for each in passing)
        tokens = queued_tokens(replica.engine.scheduler) + sum(each.queued_tokens for each in computing)
        num_before, tokens_before = self._waiting_before(number)
        requests = replica.num_requests + ending + num_before
        self.routing.report_load(number, tokens + tokens_before, requests, now_s)

    def _waiting_before(self, number: int) -> tuple[int, int]:
        """Return how many requests wait before an engine's queue, and their tokens to be computed there."""
        return 0, 0


RouterOf = Callable[[int], Routing]


def serve_fleet(
    trace: Iterable[Request], replicas: Sequence[Replica], route: Route | RouterOf = "round_robin"
) -> Routed:
    """Serve requests, in order of arrival, to the end; their figures are in the replicas' totals."""
    count = len(replicas)
    fleet = Fleet(replicas, Routing(count, route) if isinstance(route, str) else route(count))
    fleet.serve(trace)
    return fleet.routed
