"""Poll the replicas: whether each can take requests, how much is waiting in it, and which model it serves.

Every replica is asked twice a second whether it accepts requests (`/ready`, else `/health`) and, at
`/metrics`, how many prompt tokens wait there; a server without such a figure is judged by what was sent to it
alone. A replica that refuses connections is sent nothing more, but may still complete what it has begun, as
draining servers do: if it died, its system ends its connections. A silent replica has its connections ended
here.

A replica may be another kind of server, of which less is known, or one that is broken or lies. So each answer
is read up to a bound of bytes and decoded into types with bounds, and what cannot be read raises Unreadable,
whose text says which answer it was.

A router chooses a replica by load and pages, not by the `model` of a request: with replicas of two models, it
would be chance whether a request arrives where its model is. So the router has one model, that of the first
replica that became ready, and a replica of another model is sent nothing. The names in `/v1/models` decide:
aliases and adapters may differ, and a server that reports no name is accepted as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from borders.field_types import LAST_ID, LONGEST_NAME
from borders.numbers import integers
from continuous_batching.routing.routing import Routing
from serving.router.page_reader import PageReader, reached_at
from serving.router.upstream import HeaderLines, Lost, Upstream

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


MOST_INFO_BYTES = 2**20  # most bytes of /server_info, which has the recipe, and of /v1/models
MOST_METRICS_BYTES = 2**22
MOST_STATUS_BYTES = 2**16  # most bytes of /ready and /health
_MOST_FIGURE = 2**53
_LONGEST_LINE = 200
QUEUED, WAITING, RUNNING = b"cb_prompt_tokens_queued", b"cb_requests_queued", b"cb_requests_running"

Count = Annotated[int, Meta(ge=0, le=LAST_ID)]
# The pattern makes it safe in a header.
Address = Annotated[str, Meta(max_length=LONGEST_NAME, pattern=r"^[a-z]+://[!-~]+\Z")]
_Any = TypeVar("_Any")


class Unreadable(Exception):
    """A replica's answer cannot be read: it is nested too deeply, too long, or has an unexpected status."""


class TooLong(Unreadable):
    """A replica's answer is longer than the limit."""


@dataclass
class ServerInfo:
    """The fields of `/server_info` that matter here; None for a field that is missing or not understood."""

    events: str | None = None
    pages_at: str | None = None
    prompt_replicas: tuple[str, ...] | None = None
    page_size: int | None = None
    num_slots: int | None = None
    not_understood: list[str] = field(default_factory=list)  # a line for each field that is not understood


_INFO_FIELDS = (
    ("recipe.cache.events", Address),
    ("recipe.server.pages_at", Address),
    ("recipe.server.prompt_replicas", tuple[Address, ...]),
    ("page_size", Count),
    ("num_slots", Count),
)


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    parent: str | None = None  # set for an adapter


class _Models(msgspec.Struct):
    data: list[_Model]


async def ask(server: Upstream, path: str, headers: HeaderLines, most_bytes: int) -> tuple[int, bytes]:
    """Return the status and the body of an answer; raises Lost, and TooLong beyond `most_bytes`."""
    answer = await server.ask("GET", path, headers, b"")
    try:
        parts, num_bytes = [], 0
        while part := await answer.next():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > most_bytes:
                raise TooLong(f"{path} answers with more than {most_bytes} bytes")
        return answer.status, b"".join(parts)
    finally:
        server.done(answer)


def info_of(text: bytes) -> ServerInfo:
    """Read `/server_info`; a field that is not understood is skipped alone. Raises Unreadable."""
    said, info = _decoded("/server_info", text, dict[str, Any]), ServerInfo()
    if isinstance(said, str):
        info.not_understood.append(said)
        return info
    for path, kind in _INFO_FIELDS:
        try:
            setattr(info, path.rpartition(".")[2], _field_of(said, path, kind))
        except (msgspec.ValidationError, OverflowError) as error:
            info.not_understood.append(f"{path}: {error}"[:_LONGEST_LINE])
    return info


def models_of(text: bytes) -> tuple[str, ...]:
    """Return the names of a server's model from `/v1/models`, without those of adapters.

    The result is empty where the answer is not understood; raises Unreadable.
    """
    found = _decoded("/v1/models", text, _Models)
    return () if isinstance(found, str) else tuple(each.id for each in found.data if each.parent is None)


def figures_of(text: bytes) -> dict[bytes, int]:
    """Return the few figures that matter from Prometheus's text."""
    found = {}
    for line in text.splitlines():
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name in (QUEUED, WAITING, RUNNING):
            with suppress(ValueError, OverflowError):  # its value is no number
                found[name] = min(max(0, int(float(line.rpartition(b" ")[2]))), _MOST_FIGURE)
    return found


def _field_of(said: dict[str, Any], path: str, kind: Any) -> Any:
    """Return a field within objects, or None if it is missing; raises msgspec.ValidationError."""
    *outer, name = path.split(".")
    for each in outer:
        said = msgspec.convert(said.get(each), dict[str, Any] | None) or {}
    return msgspec.convert(said.get(name), kind | None)


def _decoded(path: str, text: bytes, kind: type[_Any]) -> _Any | str:
    """Decode what a replica reports, or return why it is not understood; raises Unreadable."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise Unreadable(f"{path} answers with lists or objects that are nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return str(error)[:_LONGEST_LINE] or type(error).__name__


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
