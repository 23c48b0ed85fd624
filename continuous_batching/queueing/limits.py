"""Limit how many requests and tokens may wait, and for how long.

A request beyond the limits is refused with a hint when to retry; one that has waited or run for too long is
found here and ended by the scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from continuous_batching.policies.policy import ALL
from continuous_batching.queueing.waiting_queue import WaitingQueue
from continuous_batching.request import Request

_WINDOW = 32  # steps with admissions from which the retry hint is computed
_UNKNOWN_S = 1.0  # the hint before any request was admitted


class QueueFull(ValueError):
    """A request was refused because the queue is too long.

    It may be retried in about `retry_after_s` seconds.
    """

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait, and how long; a request beyond that is refused or given up."""

    max_waiting_requests: int = ALL
    max_waiting_tokens: int = ALL  # prompt tokens of all waiting requests
    max_queue_wait_s: float = math.inf  # longest time from arrival to first admission


class QueueGate:
    """Refuses requests behind too long a queue, and finds those that have waited or run for too long."""

    def __init__(self, limits: QueueLimits, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._waiting = waiting
        # (due time, tie-breaker, whether it applies only while the request waits, the request)
        self._due: list[tuple[float, int, bool, Request]] = []
        self._most_due = 64
        # (time, requests, tokens) that had left the queue by then
        self._pace: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)

    def check(self, request: Request, num_following: int) -> None:
        """Raise QueueFull if a request and its samples are too many.

        `num_following` samples wait for other prompts.
        """
        waiting, limits = self._waiting, self._limits
        if not len(waiting):
            return  # an empty queue is never too long, however large the request
        num_requests = len(waiting) + num_following + 1 + len(request.followers)
        num_tokens = waiting.num_tokens + request.num_prompt_tokens
        for column, what, count, limit in (
            (1, "requests", num_requests, limits.max_waiting_requests),
            (2, "tokens", num_tokens, limits.max_waiting_tokens),
        ):
            if count > limit:
                retry_after_s = self._seconds_for(count - limit, column)
                raise QueueFull(
                    f"request {request.id} would be in a queue of {count} {what}; it may hold {limit}"
                    f" (scheduler.max_waiting_{what}): try again in {retry_after_s:.1f} s",
                    retry_after_s,
                )

    def watch(self, request: Request) -> None:
        """Remember when a request's time limits end."""
        wait_s, timeout_s = self._limits.max_queue_wait_s, request.timeout_s
        if wait_s < math.inf:
            heapq.heappush(self._due, (request.arrival_s + wait_s, 2 * request.number, True, request))
        if timeout_s is not None:
            heapq.heappush(self._due, (request.arrival_s + timeout_s, 2 * request.number + 1, False, request))
        if len(self._due) > self._most_due:  # most entries belong to requests that have ended; drop them
            self._due = [each for each in self._due if each[3].finish_reason is None]
            heapq.heapify(self._due)
            self._most_due = 64 + 2 * len(self._due)

    def over(self, now_s: float) -> Iterator[Request]:
        """Yield the requests whose time is over; each must be ended before the next is asked for."""
        while self._due and self._due[0][0] <= now_s:
            _, _, only_waiting, request = heapq.heappop(self._due)
            waits = self._waiting.find(request.id) is request and not request.num_preemptions
            if request.finish_reason is None and (waits or not only_waiting):
                yield request

    def measure(self, now_s: float) -> None:
        """Record how far the queue has been served."""
        totals = now_s, self._waiting.num_removed, self._waiting.num_removed_tokens
        if not self._pace or self._pace[-1][1] != totals[1]:
            self._pace.append(totals)

    def _seconds_for(self, excess: int, column: int) -> float:
        """Estimate the time until so many requests (column 1) or tokens (2) have left the queue.

        The recent pace is assumed.
        """
        if not self._pace or self._pace[-1][0] <= self._pace[0][0]:
            return _UNKNOWN_S
        first, last = self._pace[0], self._pace[-1]
        return (last[0] - first[0]) * excess / (last[column] - first[column])
