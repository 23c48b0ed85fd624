"""Poll the replicas: whether each can take requests, and how much is waiting in it.

Every replica is asked twice a second whether it accepts requests (`/ready`, else `/health`) and, at
`/metrics`, how many prompt tokens wait there; a server without such a figure is judged by what was sent to it
alone. A replica that refuses connections is sent nothing more, but may still complete what it has begun, as
draining servers do: if it died, its system ends its connections. A silent replica has its connections ended
here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

from borders.numbers import integers
from continuous_batching.routing.routing import Routing
from serving.router.fleet_model import FleetModel
from serving.router.page_reader import PageReader, reached_at
from serving.router.replica_answers import (
    MOST_INFO_BYTES,
    MOST_METRICS_BYTES,
    MOST_STATUS_BYTES,
    QUEUED,
    RUNNING,
    WAITING,
    ServerInfo,
    TooLong,
    Unreadable,
    ask,
    figures_of,
    info_of,
    models_of,
)
from serving.router.upstream import HeaderLines, Lost, Upstream

log = logging.getLogger("route")

# "refused" serves another model than the router's; "gone" is final.
State = Literal["unknown", "ready", "not ready", "refused", "lost", "gone"]
POLL_S = 0.5
_ANSWER_S = 2.0  # time limit of a poll's answer
_LOST_AFTER = 2  # polls in a row without an answer, unless the connection is refused
_BEAT_S = 0.5  # how old the figures that a replica reports may be
_TELLS_NO_MODEL = (401, 403, 404)  # the statuses of a server that has no `/v1/models`, or not for this router


Learned = Callable[[int, str, Sequence[str], int], None]  # `Splitting.is_known` has this signature


def ignore_learned(replica: int, endpoint: str, sources: Sequence[str], slots: int) -> None:
    """Ignore what was learned of a replica."""


class FleetReplica:
    """A server, by its number in the routing."""

    def __init__(
        self,
        number: int,
        url: str,
        server: Upstream,
        routing: Routing,
        headers: HeaderLines,
        learned: Learned = ignore_learned,
        model: FleetModel | None = None,
    ) -> None:
        self.number, self.url, self.server = number, url, server
        self.state: State = "unknown"
        self.trouble = ""
        self.is_drained = False  # an operator drains it: it gets no new requests
        self.leaves = False  # it gets no new requests, and is forgotten when its last one has ended
        self.num_open = self.num_sent = self.num_lost = 0
        self.num_prompts = 0  # prompts that it computed for others
        self.hit_tokens = self.prompt_tokens = 0
        self.reader: PageReader | None = None
        self._routing = routing
        self._headers, self._learned = headers, learned
        self._model = model or FleetModel()
        self._ready_path = "/ready"
        self._num_silent = 0
        self._is_asked = False  # whether its pages' endpoint and its prompt replicas are known
        self._names: Sequence[str] = ()  # names of the model that it serves
        self._warned_paths: set[str] = set()  # paths whose answer was warned of, and has not been good since

    async def watch(self, page_size: int) -> None:
        """Poll for ever; `page_size` is that of the pages whose events are to be read, or 0."""
        while True:
            try:
                await asyncio.wait_for(self._poll(page_size), _ANSWER_S)
                self._num_silent = 0
            except Lost as lost:
                self._shut(str(lost))
            except Unreadable as error:
                self._keep_out("not ready", str(error))
            except asyncio.TimeoutError:
                self._num_silent += 1
                if self.state != "ready":  # it may be another server by the time it answers
                    self._stop_reading()
                if self._num_silent >= _LOST_AFTER:
                    self.lose(f"no answer within {_ANSWER_S:g} s")
            except Exception as error:  # what one replica answers must not end the watch of the others
                trouble = f"a defect of the router in reading its answers: {type(error).__name__}"
                if trouble != self.trouble:
                    log.exception("%s: %s", self.url, trouble)
                self._keep_out("not ready", trouble)
            await asyncio.sleep(POLL_S)

    def lose(self, why: str) -> None:
        """Treat the replica as lost, with its requests; nothing is sent there before it answers again."""
        self._shut(why)
        self.server.lose(f"the replica is lost: {why}")

    def _shut(self, why: str) -> None:
        """Send it nothing, and forget what it held; whichever server answers there next is asked anew."""
        self._stop_reading()
        if self.state != "lost":
            self._become("lost", why)
            self._routing.lost(self.number)
        self.trouble = why

    def drain(self, is_drained: bool) -> None:
        """Stop sending it new requests, or resume."""
        self.is_drained = is_drained
        self._open()

    def leave(self, leaves: bool) -> None:
        """Stop sending it new requests and forget it after the last, or keep it after all."""
        self.leaves = leaves
        self._open()

    def forget(self) -> None:
        """Forget the replica, which frees its number."""
        self.close()
        self._learned(self.number, "", (), 0)
        self._routing.leave(self.number)
        self._model.forget(self.url)
        self.state = "gone"

    def close(self) -> None:
        """Stop reading from it, and end its connections."""
        self._stop_reading()
        self.server.lose("the router ends")

    async def _poll(self, page_size: int) -> None:
        status, _ = await self._get(self._ready_path, MOST_STATUS_BYTES)
        if status == 404 and self._ready_path == "/ready":
            self._ready_path = "/health"
            status, _ = await self._get(self._ready_path, MOST_STATUS_BYTES)
        if status != 200:
            self._keep_out("not ready", f"{self._ready_path} says {status}")
            return
        since_s = time.monotonic()
        if not self._is_asked:
            self._names = await self._ask_names()
            if refusal := self._model.refusal(self.url, self._names):
                self._keep_out("refused", refusal)
                return
            await self._read_info(page_size)
            self._is_asked = True
        figures = await self._ask_figures()
        if refusal := self._model.claim(self.url, self._names):
            self._keep_out("refused", refusal)
            return
        self._become("ready", "")
        if QUEUED in figures:
            requests = figures.get(WAITING, 0) + figures.get(RUNNING, 0)
            self._routing.report_load(self.number, figures[QUEUED], requests, since_s - _BEAT_S)

    def _keep_out(self, state: State, trouble: str) -> None:
        """Send it no new requests, and ask again for what it reports about itself."""
        self._become(state, trouble)
        self._stop_reading()

    async def _ask_names(self) -> Sequence[str]:
        """Return the names of the model that it serves, or none where it does not say.

        Raises Unreadable where that may change with the next poll.
        """
        path, names, why = "/v1/models", tuple[str, ...](), "/v1/models names none"
        try:
            status, text = await self._get(path, MOST_INFO_BYTES)
        except TooLong as error:
            why = str(error)
        else:
            if status == 200:
                names = models_of(text)
            elif status in _TELLS_NO_MODEL:
                why = f"{path} says {status}"
            else:
                raise Unreadable(f"{path} says {status}")
        self._warn_once(path, "" if names else f"its model is unknown, and is not checked: {why}")
        return names

    async def _ask_figures(self) -> dict[bytes, int]:
        path, why, figures = "/metrics", "", dict[bytes, int]()
        try:
            status, text = await self._get(path, MOST_METRICS_BYTES)
        except TooLong as error:
            why = f"its figures are ignored: {error}"
        else:
            figures = figures_of(text) if status == 200 else {}
        self._warn_once(path, why)
        return figures

    def _warn_once(self, path: str, trouble: str) -> None:
        """Log what is wrong with its answers at this path.

        That is done once until they are good again (`trouble` is "").
        """
        if not trouble:
            self._warned_paths.discard(path)
        elif path not in self._warned_paths:
            self._warned_paths.add(path)
            log.warning("%s: %s", self.url, trouble)

    async def _read_info(self, page_size: int) -> None:
        """Learn whether it computes prompts for others, who does so for it, and how many slots it has.

        Also read the events of its pages, if it says where they are published and their page size is the
        router's.
        """
        status, text = await self._get("/server_info", MOST_INFO_BYTES)
        said = info_of(text) if status == 200 else ServerInfo()
        for trouble in said.not_understood:  # it is another kind of server
            log.warning("%s: /server_info is not understood: %s", self.url, trouble)
        endpoint, pages_at = said.events, reached_at(said.pages_at or "", self.server.host)
        self._learned(self.number, pages_at, said.prompt_replicas or (), said.num_slots or 0)
        if not page_size or endpoint is None:
            return
        if said.page_size != page_size:
            log.warning("%s: pages of %s tokens, not %d: by text alone", self.url, said.page_size, page_size)
            return
        try:
            self.reader = PageReader(endpoint, self.server.host, self.number, self._routing)
        except (ValueError, OSError) as error:
            log.warning("%s: its pages cannot be read at %s: %s", self.url, endpoint, error)
            return
        self.reader.start()

    def _stop_reading(self) -> None:
        self._is_asked = False
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    async def _get(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        return await ask(self.server, path, self._headers, most_bytes)

    def _become(self, state: State, trouble: str) -> None:
        if (state, trouble) != (self.state, self.trouble):
            log.log(
                logging.INFO if state == "ready" else logging.WARNING,
                "%s is %s%s",
                self.url,
                state,
                trouble and f": {trouble}",
            )
        self.state, self.trouble = state, trouble
        self._open()

    def _open(self) -> None:
        self._routing.is_open[self.number] = self.state == "ready" and not self.is_drained and not self.leaves


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of http://HOST:PORT; raises ValueError."""
    kind, _, rest = url.rstrip("/").partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "http" or not host or integers(1, 2**16 - 1).parse(port) is None:
        raise ValueError(f"{url} is not of the form http://HOST:PORT")
    return host.strip("[]"), int(port)


def replicas_of(
    urls: Sequence[str], routing: Routing, headers: HeaderLines, learned: Learned, model: FleetModel
) -> list[FleetReplica]:
    """Return the replicas at these addresses; raises ValueError for one that is no address."""
    if len({*urls}) < len(urls):
        raise ValueError("an address appears twice among --replica; name each once")
    return [
        FleetReplica(number, url, Upstream(*address_of(url)), routing, headers, learned, model)
        for number, url in enumerate(urls)
    ]
