"""Decide which model the replicas of a router must serve.

A router chooses a replica by load and pages, not by the `model` of a request: with replicas of two models, it
would be chance whether a request arrives where its model is. So the router has one model, that of the first
replica that became ready, and a replica of another model is sent nothing. The names in `/v1/models` decide:
aliases and adapters may differ, and a server that reports no name is accepted as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CLAIM_S = 600.0  # a restart that loads a large model takes minutes


@dataclass(slots=True)
class _Claim:
    names: Sequence[str]
    ready_s: float  # when its replica was last ready


class FleetModel:
    """Knows which names each replica last served, by its address.

    A replica claims the model for the router where it is ready, and holds it until it serves another one, is
    removed, or has not been ready for `CLAIM_S`. The router's model stays while any replica holds it; after
    that, the next replica that becomes ready decides.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.name = ""
        self._claims: dict[str, _Claim] = {}
        self._now_s = now_s

    def refusal(self, url: str, names: Sequence[str]) -> str:
        """Return why a replica with these names gets no requests, "" where it may; it claims nothing yet."""
        if not names or self.name in names:
            return ""
        self._claims.pop(url, None)  # what it claimed before, it serves no more
        holder = self._holder()
        if not holder:
            return ""
        return (
            f"it serves the model {names[0]!r}, and this router's is {self.name!r}, which {holder} last"
            " served: start it with that model, give it a router of its own, or let go of each that serves"
            f" {self.name!r} with POST /fleet/remove?{holder}"
        )

    def claim(self, url: str, names: Sequence[str]) -> str:
        """Note that a replica is ready with these names, or with those it had before where it reports none.

        Returns why the replica is refused after all, as `refusal` does.
        """
        refusal = self.refusal(url, names)
        if refusal:
            return refusal
        if names:
            if self.name not in names:
                self.name = names[0]
            self._claims[url] = _Claim(names, self._now_s())
        elif url in self._claims:
            self._claims[url].ready_s = self._now_s()
        return ""

    def forget(self, url: str) -> None:
        """Drop the claim of a replica that has left."""
        self._claims.pop(url, None)

    def _holder(self) -> str:
        """Return the first replica that holds the router's model, "" where none does."""
        since_s = self._now_s() - CLAIM_S
        held = (
            url for url, each in self._claims.items() if self.name in each.names and each.ready_s >= since_s
        )
        return next(held, "")
