"""Keep the list of replicas while they come and go.

Replicas are announced by whoever starts and ends them, or found as the addresses of a name: a headless
Service of Kubernetes has one address for each of its pods. A replica that is to leave gets no new request,
and is forgotten when its last one has ended, so no request is lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from continuous_batching.routing.routing import Routing
from serving.router.models import FleetModels
from serving.router.replicas import (
    NO_PROOFS,
    FleetReplica,
    Learned,
    ReplicaTrust,
    address_of,
    ignore_learned,
    replicas_of,
    upstream_of,
)
from serving.router.upstream import HeaderLines

log = logging.getLogger("route")

MOST_REPLICAS = 4096
_LOOKS_S = 0.1
_RESOLVES_S = 1.0


class FleetMembers:
    """The replicas behind a router; `replicas` holds them by number, including those whose number is free."""

    def __init__(
        self,
        urls: Sequence[str],
        routing: Routing,
        headers: HeaderLines,
        learned: Learned = ignore_learned,
        models: FleetModels | None = None,
        trust: ReplicaTrust = NO_PROOFS,
    ) -> None:
        self.models = models or FleetModels()
        self.replicas = replicas_of(urls, routing, headers, learned, self.models, trust)
        self._trust = trust
        self._routing = routing
        self._headers, self._learned = headers, learned
        self._given = {each.url for each in self.replicas}  # these stay, whatever names resolve to
        self._named: dict[str, set[str]] = {}  # the addresses that each name last resolved to

    def find(self, url: str) -> FleetReplica | None:
        """Return the replica with this address, or None."""
        url = url.rstrip("/")
        return next((each for each in self.replicas if each.url == url and each.state != "gone"), None)

    def add(self, url: str) -> FleetReplica:
        """Add a replica, which gets requests once it is ready; raises ValueError for what is no address.

        It stays until it is removed, whatever the names that are followed resolve to.
        """
        replica = self._come(url)
        self._given.add(replica.url)
        return replica

    def remove(self, url: str) -> FleetReplica | None:
        """Send a replica no new requests, and forget it when its last one has ended."""
        replica = self._leave(url)
        if replica is not None:
            self._given.discard(replica.url)
        return replica

    def _come(self, url: str) -> FleetReplica:
        if (known := self.find(url)) is not None:
            known.leave(False)
            return known
        if sum(each.state != "gone" for each in self.replicas) >= MOST_REPLICAS:
            raise ValueError(f"there are {MOST_REPLICAS} replicas, the most that one router has")
        server = upstream_of(url, self._trust)
        number = self._routing.join()
        replica = FleetReplica(
            number, url, server, self._routing, self._headers, self._learned, self.models, self._trust
        )
        self.replicas[number : number + 1] = [replica]
        log.info("%s has come", replica.url)
        return replica

    def _leave(self, url: str) -> FleetReplica | None:
        replica = self.find(url)
        if replica is not None and not replica.leaves:
            replica.leave(True)
            log.info("%s leaves when its %d requests have ended", replica.url, replica.num_open)
        return replica

    async def watch(self, page_size: int) -> None:
        """Watch all replicas, for ever (see `FleetReplica.watch`)."""
        watching: dict[FleetReplica, asyncio.Task[None]] = {}
        try:
            while True:
                for each in self.replicas:
                    if each.leaves and each.state != "gone" and not each.num_open:
                        if (task := watching.pop(each, None)) is not None:
                            task.cancel()
                            await asyncio.wait([task])
                        each.forget()
                        log.info("%s has left", each.url)
                    elif each.state != "gone" and each not in watching:
                        watching[each] = asyncio.ensure_future(each.watch(page_size))
                for task in watching.values():
                    if task.done():
                        task.result()  # raises if the task ended by a defect
                await asyncio.sleep(_LOOKS_S)
        finally:
            for task in watching.values():
                task.cancel()

    async def follow(self, url: str) -> None:
        """Keep every address of the name in http://NAME:PORT, or https://, as a replica, for ever.

        An address that leaves the name stays where it was given itself, or is one of another name.
        Where the name cannot be resolved, the replicas stay: a name server that is unreachable has ended
        none.
        """
        kind, (name, port) = url.partition("://")[0], address_of(url)
        loop, trouble = asyncio.get_running_loop(), ""
        while True:
            try:
                found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except OSError as error:
                if str(error) != trouble:
                    log.warning("%s: %s; the replicas stay as they are", url, error)
                trouble = str(error)
            else:
                trouble = ""
                self._become(url, {_url(kind, str(address[0]), port) for *_, address in found})
            await asyncio.sleep(_RESOLVES_S)

    def _become(self, name: str, urls: set[str]) -> None:
        before = self._named.get(name, set())
        for url in sorted(urls - before):
            self._come(url)
        self._named[name] = urls
        for url in sorted(before - self._given.union(*self._named.values())):
            self._leave(url)


def _url(kind: str, address: str, port: int) -> str:
    return f"{kind}://[{address}]:{port}" if ":" in address else f"{kind}://{address}:{port}"
