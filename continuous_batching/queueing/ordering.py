"""Define the orders in which waiting requests may be admitted.

An order is a key that a request keeps for as long as it waits. Ageing needs no more: where every request
gains urgency at the same rate, the difference of two of them stays what it was, and with it their order. So
the oldest goes first in the end, at the cost of a heap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from continuous_batching.request import Request

QueueOrder = Callable[[Request], float]  # the smallest goes first; ties go by arrival number


def shortest_first(request: Request) -> float:
    """Order by prompt and longest answer together.

    The key does not age: a long request waits while short ones come.
    """
    return float(request.num_prompt_tokens + request.params.max_tokens)


@dataclass(frozen=True, slots=True)
class Aged:
    """An order by waiting time, priority and length, each converted to seconds.

    A level of priority counts as `priority_s` seconds of waiting, and 1,000 tokens of prompt and longest
    answer as `length_s` seconds less of it. A request is overtaken only by those that arrive within the
    seconds that it is behind; against later ones its age decides. The composite of the sources' chapter on
    dynamic batching is weighed in this way, with its hyperbola of the length (by which ten tokens count as
    1,000 s) replaced by a line.
    """

    priority_s: float
    length_s: float

    def __call__(self, request: Request) -> float:
        """Return the arrival time that the request is treated as having."""
        tokens = request.num_prompt_tokens + request.params.max_tokens
        return request.arrival_s - self.priority_s * request.priority + self.length_s * tokens / 1000


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """An order by the time at which a request times out.

    It is `deadline_s` after the arrival if the request has no timeout.
    """

    deadline_s: float

    def __call__(self, request: Request) -> float:
        """Return the deadline on the engine's clock."""
        return request.arrival_s + (self.deadline_s if request.timeout_s is None else request.timeout_s)
