"""By what are waiting requests ordered?

An order is a key that a request keeps for as long as it waits. Ageing needs no more: where every request
gains urgency at the same rate, the difference of two stays what it was, and with it their order. So the
oldest goes first in the end, at the cost of a heap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from continuous_batching.request import Request

QueueOrder = Callable[[Request], float]  # the least goes first; ties go by arrival number


def shortest_first(request: Request) -> float:
    """By prompt and longest answer together. It does not age: a long request waits while short ones come."""
    return float(request.num_prompt_tokens + request.params.max_tokens)


@dataclass(frozen=True, slots=True)
class Aged:
    """By waiting time, priority and length, the one weighed against the other in seconds.

    A level of priority counts like `priority_s` of waiting, and 1,000 tokens of prompt and longest answer
    like `length_s` that it has waited less. A request is overtaken only by those that arrive within the
    seconds that it is behind; after these it is the oldest that counts. The composite of the sources'
    chapter on dynamic batching is weighed so, with its hyperbola of the length (which lets ten tokens count
    like 1,000 s) made a line.
    """

    priority_s: float
    length_s: float

    def __call__(self, request: Request) -> float:
        """The arrival that it is treated as having."""
        tokens = request.num_prompt_tokens + request.params.max_tokens
        return request.arrival_s - self.priority_s * request.priority + self.length_s * tokens / 1000


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """By the time at which a request is given up, or `deadline_s` after its arrival where it never is."""

    deadline_s: float

    def __call__(self, request: Request) -> float:
        """The time, on the engine's clock, when it is given up."""
        return request.arrival_s + (self.deadline_s if request.timeout_s is None else request.timeout_s)
