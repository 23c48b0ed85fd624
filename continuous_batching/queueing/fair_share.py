"""Let tenants take turns by the tokens that each was served.

After the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024): a tenant's counter
grows by the tokens computed for it, prompt and answer, divided by its weight, and the tenant with the
smallest counter goes next. A tenant that returns starts no lower than the smallest counter of those that
wait, so that nobody saves up turns by being away.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

_SPARE = 64  # number of idle tenants remembered beyond those that matter, so that forgetting them is rare


class FairShare:
    """A counter for each tenant that waits, runs, or was served more than its share."""

    def __init__(self, slots: SlotPool, weights: Mapping[str, float]) -> None:
        self._slots = slots
        self._weights = dict(weights)  # tenants that are not listed weigh 1
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._served: NDArray[np.float64] = np.zeros(0)  # tokens served, divided by the weight
        self._weight: NDArray[np.float64] = np.zeros(0)
        self._num_waiting: Index = np.zeros((0, 2), dtype=np.int64)  # short and long requests
        # Arrival number of the request with which a tenant's present wait began
        self._joined: Index = np.zeros(0, dtype=np.int64)
        self._floor = 0.0  # counter with which a tenant starts; it never falls
        self._last = ""  # tenant of the request that left the queue last
        # Arrival number of the row's request when its tenant was looked up: a cache of `_row_tenant`
        self._row_number: Index = np.full(slots.num_slots, -1, dtype=np.int64)
        self._row_tenant: Index = np.zeros(slots.num_slots, dtype=np.int64)

    def join(self, request: Request, is_long: bool) -> None:
        """Count a request of a tenant that begins to wait."""
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
        """Count a request of a tenant that has left the queue."""
        self._num_waiting[self._index[request.tenant], int(is_long)] -= 1
        self._last = request.tenant

    def next(self, short_only: bool) -> str | None:
        """Return the waiting tenant whose request goes next, or None; ties go by arrival."""
        waiting = self._num_waiting[:, 0] > 0 if short_only else self._num_waiting.any(axis=1)
        served = np.where(waiting, self._served, np.inf)
        least = served.min(initial=np.inf)
        if least == np.inf:
            return None
        equal = np.flatnonzero(served == least)
        return self._names[int(equal[np.argmin(self._joined[equal])])]

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        """Charge a tenant for the prompt tokens that its admitted request will compute."""
        tenant = self._tenant(request.tenant)
        self._served[tenant] += num_tokens / self._weight[tenant]

    def charge_answers(self, rows: Index) -> None:
        """Charge the tenants of these rows for one token each."""
        slots = self._slots
        unknown = rows[self._row_number[rows] != slots.number[rows]]
        for row in unknown.tolist():
            # No tenant is forgotten here, because the indices found for earlier rows would then be stale.
            self._row_tenant[row] = self._tenant(slots.requests[row].tenant, may_forget=False)
            self._row_number[row] = slots.number[row]
        self._served += np.bincount(self._row_tenant[rows], minlength=len(self._names)) / self._weight

    def served(self, tenant: str) -> float:
        """Return a tenant's counter: tokens served, divided by its weight."""
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
        """Drop the tenants whose counter equals that of a new tenant."""
        kept = self._num_waiting.any(axis=1) | (self._served > self._floor)
        if len(kept) - np.count_nonzero(kept) < _SPARE:
            return
        self._names = [name for name, keep in zip(self._names, kept.tolist()) if keep]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._served, self._weight = self._served[kept], self._weight[kept]
        self._num_waiting, self._joined = self._num_waiting[kept], self._joined[kept]
        self._row_number[:] = -1
