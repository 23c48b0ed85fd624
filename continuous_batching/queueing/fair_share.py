"""Whose turn is it, by what each tenant was served?

After the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024): a tenant's
counter grows by the tokens computed for it, prompt and answer, over its weight; who has the least goes next.
A tenant that comes back starts no lower than the least of those that wait: nobody saves up turns by being
away.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

_SPARE = 64  # tenants that are remembered beyond those that matter, so that forgetting is rare


class FairShare:
    """A counter for each tenant that waits, runs or was served more than its share."""

    def __init__(self, slots: SlotPool, weights: Mapping[str, float]) -> None:
        self._slots = slots
        self._weights = dict(weights)  # of those that do not weigh 1
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._served: NDArray[np.float64] = np.zeros(0)  # tokens over weight
        self._weight: NDArray[np.float64] = np.zeros(0)
        self._num_waiting: Index = np.zeros((0, 2), dtype=np.int64)  # short and long requests
        self._joined: Index = np.zeros(0, dtype=np.int64)  # the arrival number it began to wait with
        self._floor = 0.0  # where a tenant starts, which never falls
        self._last = ""  # who left the queue last
        self._row_number: Index = np.full(slots.num_slots, -1, dtype=np.int64)  # whose tenant is known
        self._row_tenant: Index = np.zeros(slots.num_slots, dtype=np.int64)

    def join(self, request: Request, is_long: bool) -> None:
        """A request of a tenant waits."""
        tenant = self._tenant(request.tenant)
        if not self._num_waiting[tenant].any():
            waiting = self._num_waiting.any(axis=1)
            if waiting.any():
                self._floor = max(self._floor, float(self._served[waiting].min()))
            elif self._last in self._index:
                self._floor = max(self._floor, self.served(self._last))
            self._served[tenant] = max(self._served[tenant], self._floor)
            self._joined[tenant] = request.number
        self._num_waiting[tenant, int(is_long)] += 1

    def leave(self, request: Request, is_long: bool) -> None:
        """A request of a tenant left the queue."""
        self._num_waiting[self._index[request.tenant], int(is_long)] -= 1
        self._last = request.tenant

    def next(self, short_only: bool) -> str | None:
        """Whose request goes next, of those that have one waiting; equal ones by arrival."""
        waiting = self._num_waiting[:, 0] > 0 if short_only else self._num_waiting.any(axis=1)
        served = np.where(waiting, self._served, np.inf)
        least = served.min(initial=np.inf)
        if least == np.inf:
            return None
        equal = np.flatnonzero(served == least)
        return self._names[int(equal[np.argmin(self._joined[equal])])]

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        """A request came in, of whose prompt so many tokens will be computed."""
        tenant = self._tenant(request.tenant)
        self._served[tenant] += num_tokens / self._weight[tenant]

    def charge_answers(self, rows: Index) -> None:
        """Each of these rows got a token."""
        slots = self._slots
        unknown = rows[self._row_number[rows] != slots.number[rows]]
        for row in unknown.tolist():
            # without forgetting any: the indices of the rows before would be stale
            self._row_tenant[row] = self._tenant(slots.requests[row].tenant, may_forget=False)
            self._row_number[row] = slots.number[row]
        self._served += np.bincount(self._row_tenant[rows], minlength=len(self._names)) / self._weight

    def served(self, tenant: str) -> float:
        """Tokens over weight, as they count."""
        return float(self._served[self._index[tenant]])

    def _tenant(self, name: str, *, may_forget: bool = True) -> int:
        if name not in self._index:
            if may_forget:
                self._forget()
            self._index[name] = len(self._names)
            self._names.append(name)
            self._served = np.append(self._served, self._floor)
            self._weight = np.append(self._weight, self._weights.get(name, 1.0))
            self._num_waiting = np.append(self._num_waiting, [[0, 0]], axis=0)
            self._joined = np.append(self._joined, 0)
        return self._index[name]

    def _forget(self) -> None:
        """Drop the tenants that would start where a new one does."""
        kept = self._num_waiting.any(axis=1) | (self._served > self._floor)
        if len(kept) - np.count_nonzero(kept) < _SPARE:
            return
        self._names = [name for name, keep in zip(self._names, kept.tolist()) if keep]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._served, self._weight = self._served[kept], self._weight[kept]
        self._num_waiting, self._joined = self._num_waiting[kept], self._joined[kept]
        self._row_number[:] = -1
