"""Poll the replicas: whether each can take requests, how much is waiting in it, and which model it serves.

Every replica is asked twice a second whether it accepts requests (`/ready`, or where that is not found
`/health`, and `/ready` again every so many seconds) and, at `/metrics`, how many prompt tokens wait there; a
server without such a figure is judged by what was sent to it alone. A replica that refuses connections is
sent nothing more, but may still complete what it has begun, as draining servers do: if it died, its system
ends its connections. A silent replica has its connections ended here.

A replica may be another kind of server, of which less is known, or one that is broken or lies. So each answer
is read up to a bound of bytes and decoded into types with bounds, and what cannot be read raises Unreadable,
whose text says which answer it was.

What a replica lists in `/v1/models` is read with every poll, since adapters come and go while it runs, and
before it gets requests again, since another server may have taken its place.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import anyio
import msgspec
from msgspec import Meta

from borders.addresses import is_loopback
from borders.field_types import LAST_ID, LONGEST_NAME
from borders.numbers import integers
from continuous_batching.routing.routing import Routing
from serving.router.models import LISTS_NOTHING, FleetModels, Listed
from serving.router.page_reader import PageReader, is_of_others, reached_at
from serving.router.upstream import HeaderLines, Lost, Upstream
from serving.tls import Tls

MOST_INFO_BYTES = 2**20  # most bytes of /server_info, which has the recipe, and of /v1/models
MOST_METRICS_BYTES = 2**22
MOST_STATUS_BYTES = 2**16  # most bytes of /ready and /health
_MOST_FIGURE = 2**53
_LONGEST_LINE = 200
QUEUED, WAITING, RUNNING = b"cb_prompt_tokens_queued", b"cb_requests_queued", b"cb_requests_running"

Count = Annotated[int, Meta(ge=0, le=LAST_ID)]
# The pattern makes it safe in a header.
Address = Annotated[str, Meta(max_length=LONGEST_NAME, pattern=r"^[a-z]+://[!-~]+\Z")]
Fingerprint = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
_Any = TypeVar("_Any")


class Unreadable(Exception):
    """A replica's answer cannot be read: it is nested too deeply, too long, or has an unexpected status."""


class TooLong(Unreadable):
    """A replica's answer is longer than the limit."""


class Late(Unreadable):
    """A replica's answer has not come in time."""


@dataclass
class ServerInfo:
    """The fields of `/server_info` that matter here; None for a field that is missing or not understood."""

    events: str | None = None
    pages_at: str | None = None
    prompt_replicas: tuple[str, ...] | None = None
    page_size: int | None = None
    num_slots: int | None = None
    continuations: str | None = None  # fingerprint of the servers at which its answers may go on
    not_understood: list[str] = field(default_factory=list)  # a line for each field that is not understood


_INFO_FIELDS = (
    ("recipe.cache.events", Address),
    ("recipe.server.pages_at", Address),
    ("recipe.server.prompt_replicas", tuple[Address, ...]),
    ("page_size", Count),
    ("num_slots", Count),
    ("continuations", Fingerprint),
)


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    parent: str | None = None  # set for an adapter


class _Models(msgspec.Struct):
    data: list[_Model]


class _Entries(msgspec.Struct):
    data: list[msgspec.Raw]  # which are passed on unread


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


def listed_of(text: bytes) -> Listed:
    """Return what a server lists in `/v1/models`; an entry with a parent is an adapter.

    Nothing is listed where the answer is not understood, or names no model; raises Unreadable.
    """
    path = "/v1/models"
    found, entries = _decoded(path, text, _Models), _decoded(path, text, _Entries)
    if isinstance(found, str) or isinstance(entries, str):
        return LISTS_NOTHING
    models = dict.fromkeys(each.id for each in found.data if each.parent is None)
    adapters = dict.fromkeys(each.id for each in found.data if each.id not in models)
    by_name = {each.id: bytes(entry) for each, entry in zip(reversed(found.data), reversed(entries.data))}
    names = (*models, *adapters) if models else ()
    return Listed({name: by_name[name] for name in names}, tuple(models), tuple(adapters) if models else ())


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

State = Literal["unknown", "ready", "not ready", "lost", "gone"]  # "gone" is final
POLL_S = 0.5
_ANSWER_S = 2.0  # time limit of each answer to a poll
_LOST_AFTER = 2  # polls in a row whose /ready has no answer, unless the connection is refused
_NO_READY_S = 10.0  # time after which a path /ready that was not found is asked for again
_BEAT_S = 0.5  # how old the figures that a replica reports may be
_TELLS_NO_MODEL = (401, 403, 404)  # the statuses of a server that has no `/v1/models`, or not for this router


@dataclass(frozen=True, slots=True)
class ReplicaTrust:
    """By what a router believes that replicas are those of its operator, beyond their addresses."""

    events_secret: bytes | None = None  # which publishers of events prove
    events_open: bool = False  # events of other machines are believed without it
    tls: Tls | None = None  # what replicas at https:// addresses prove

    def believes_events(self, endpoint: str, host: str) -> bool:
        """Return whether events of a replica on this host are to be read at an endpoint."""
        return self.events_open or self.events_secret is not None or not is_of_others(endpoint, host)


NO_PROOFS = ReplicaTrust()
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
        models: FleetModels | None = None,
        trust: ReplicaTrust = NO_PROOFS,
    ) -> None:
        self.number, self.server = number, server
        self.url = url.rstrip("/")  # The same server whether or not its address ends in a slash
        self.state: State = "unknown"
        self.trouble = ""
        self.is_drained = False  # an operator drains it: it gets no new requests
        self.leaves = False  # it gets no new requests, and is forgotten when its last one has ended
        self.num_open = self.num_sent = self.num_lost = 0
        self.num_prompts = 0  # prompts that it computed for others
        self.hit_tokens = self.prompt_tokens = 0
        self.reader: PageReader | None = None
        # Fingerprint of the replicas at which its answers may go on; None: it tells nothing of them
        self.continuations: str | None = None
        self._routing = routing
        self._headers, self._learned = headers, learned
        self._models, self._trust = models or FleetModels(), trust
        self._models.join(number)
        self._ready_path = "/ready"
        self._no_ready_s = -math.inf  # when `/ready` was last not found
        self._num_silent = 0
        self._is_asked = False  # whether its pages' endpoint and its prompt replicas are known
        self._events: str | None = None  # its pages' endpoint, if they are of the router's size
        self._warned_paths: set[str] = set()  # those that were warned of, and have not been good since

    @property
    def listed(self) -> Listed:
        """What it last listed of its models."""
        return self._models.of(self.number) or LISTS_NOTHING

    async def watch(self, page_size: int) -> None:
        """Poll for ever; `page_size` is that of the pages whose events are to be read, or 0."""
        while True:
            try:
                await self._poll(page_size)
            except Lost as lost:
                self._shut(str(lost))
            except Unreadable as error:
                self._keep_out("not ready", str(error))
            except Exception as error:  # what one replica answers must not end the watch of the others
                trouble = f"a defect of the router in reading its answers: {type(error).__name__}"
                if trouble != self.trouble:
                    log.exception("%s: %s", self.url, trouble)
                self._keep_out("not ready", trouble)
            await asyncio.sleep(POLL_S)

    def _note_silence(self, is_silent: bool) -> None:
        """Note whether `/ready` had no answer in time; several in a row mean that the replica is lost."""
        self._num_silent = self._num_silent + 1 if is_silent else 0
        if is_silent and self.state != "ready":  # it may be another server by the time it answers
            self._stop_reading()
        if self._num_silent >= _LOST_AFTER:
            self.lose(f"no answer within {_ANSWER_S:g} s")

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
        self._models.forget(self.number)
        self.state = "gone"

    def close(self) -> None:
        """Stop reading from it, and end its connections."""
        self._stop_reading()
        self.server.lose("the router ends")

    async def _poll(self, page_size: int) -> None:
        path, self._ready_path = self._ready_path, "/ready"  # unless the other one says that it is ready
        if time.monotonic() - self._no_ready_s >= _NO_READY_S:
            path = "/ready"
        try:
            status, _ = await self._get(path, MOST_STATUS_BYTES)
            if status == 404 and path == "/ready":
                # Another kind of server; an ingress says so, too, while it has none behind it
                path, self._no_ready_s = "/health", time.monotonic()
                status, _ = await self._get(path, MOST_STATUS_BYTES)
        except Late:
            self._note_silence(True)
            return
        self._note_silence(False)
        if status != 200:
            self._keep_out("not ready", f"{path} says {status}")
            await self._hear_early()
            return
        self._ready_path = path
        since_s = time.monotonic()
        self._learn(await self._ask_models())
        if not self._is_asked:
            await self._read_info(page_size)
            self._is_asked = True
        self._read_pages()
        figures = await self._ask_figures()
        self._become("ready", "")
        if QUEUED in figures:
            requests = figures.get(WAITING, 0) + figures.get(RUNNING, 0)
            self._routing.report_load(self.number, figures[QUEUED], requests, since_s - _BEAT_S)

    def _keep_out(self, state: State, trouble: str) -> None:
        """Send it no new requests, and ask again for what it reports about itself."""
        self._become(state, trouble)
        self._stop_reading()

    async def _ask_models(self) -> Listed:
        """Return the models that it lists, which may be none.

        Raises Unreadable where that may change with the next poll, unless it has been ready since it was last
        heard.
        """
        path, listed, why = "/v1/models", LISTS_NOTHING, "/v1/models names none"
        known = self._models.of(self.number) if self._is_asked else None
        try:
            status, text = await self._get(path, MOST_INFO_BYTES)
        except TooLong as error:
            why = str(error)
        except Late as error:
            if known is None:
                raise
            self._warn_once(path, f"it serves what it listed before: {error}")
            return known
        else:
            if status == 200:
                listed = listed_of(text)
            elif status in _TELLS_NO_MODEL:
                why = f"{path} says {status}"
            elif known is None:
                raise Unreadable(f"{path} says {status}")
            else:
                return known
        self._warn_once(path, "" if listed.models else f"its model is unknown, and is not checked: {why}")
        return listed

    async def _hear_early(self) -> None:
        """Learn what it will serve while it is not ready yet, if it was never heard and says so."""
        if self._models.of(self.number) is None:
            with suppress(Unreadable):
                status, text = await self._get("/v1/models", MOST_INFO_BYTES)
                if status == 200 and (listed := listed_of(text)).models:
                    self._learn(listed)

    def _learn(self, listed: Listed) -> None:
        """Note what it lists; where its model has changed, another server has taken its place."""
        before = self._models.of(self.number)
        if before is not None and before.models != listed.models:
            log.warning(
                "%s serves %s, and no longer %s",
                self.url,
                *(_named(each.models) for each in (listed, before)),
            )
            self._stop_reading()
            self._routing.lost(self.number)
        self._models.learn(self.number, listed)

    async def _ask_figures(self) -> dict[bytes, int]:
        path, why, figures = "/metrics", "", dict[bytes, int]()
        try:
            status, text = await self._get(path, MOST_METRICS_BYTES)
        except (TooLong, Late) as error:
            why = f"its figures are ignored: {error}"
        else:
            figures = figures_of(text) if status == 200 else {}
        self._warn_once(path, why)
        return figures

    def _warn_once(self, path: str, trouble: str) -> None:
        """Log what is wrong with its answers at this path, or with reading this endpoint of its pages.

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
        pages_at = reached_at(said.pages_at or "", self.server.host)
        self.continuations = said.continuations
        self._learned(self.number, pages_at, said.prompt_replicas or (), said.num_slots or 0)
        if not page_size or said.events is None:
            return
        if said.page_size != page_size:
            log.warning("%s: pages of %s tokens, not %d: by text alone", self.url, said.page_size, page_size)
        elif self._trust.believes_events(said.events, self.server.host):
            self._events = said.events
        else:
            log.warning(
                "%s: its events of pages are not read, since nothing would prove that they are its own: set"
                " cache.events_key_file, or cache.events_open, in the router's recipe too",
                self.url,
            )

    def _read_pages(self) -> None:
        """Begin or end to read the events of its pages, which the recipe's keys name for its model alone."""
        if self._events is None or not self._models.reads_pages(self.number):
            self._close_reader()
        elif self.reader is None:
            try:
                self.reader = PageReader(
                    self._events,
                    self.server.host,
                    self.number,
                    self._routing,
                    self._trust.events_secret,
                )
            except ValueError as error:  # no later poll can do better
                log.warning("%s: its pages cannot be read at %s: %s", self.url, self._events, error)
                self._events = None
            except OSError as error:  # as without a free descriptor, which the next poll may find
                self._warn_once(self._events, f"its pages cannot be read at {self._events} now: {error}")
            else:
                self._warn_once(self._events, "")
                self.reader.start()

    def _stop_reading(self) -> None:
        """Ask it anew for what it reports about itself."""
        self._is_asked, self._events, self.continuations = False, None, None
        self._close_reader()

    def _close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    async def _get(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        with anyio.move_on_after(_ANSWER_S):  # wait_for may swallow a cancellation
            return await ask(self.server, path, self._headers, most_bytes)
        raise Late(f"{path} has no answer within {_ANSWER_S:g} s")

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


def _named(models: Sequence[str]) -> str:
    return f"the model {models[0]!r}" if models else "a model that it does not name"


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of http://HOST:PORT, or https:// in its place; raises ValueError."""
    kind, _, rest = url.rstrip("/").partition("://")
    host, _, port = rest.rpartition(":")
    if kind not in ("http", "https") or not host or integers(1, 2**16 - 1).parse(port) is None:
        raise ValueError(f"{url} is not of the form http://HOST:PORT or https://HOST:PORT")
    return host.strip("[]"), int(port)


def upstream_of(url: str, trust: ReplicaTrust) -> Upstream:
    """Return the connections to the server at an address; raises ValueError for one that cannot be used."""
    is_encrypted = url.startswith("https://")
    if is_encrypted and trust.tls is None:
        raise ValueError(f"{url} is encrypted, and the router has no --tls-authority to know it by")
    host, port = address_of(url)
    if trust.tls is not None and not (is_encrypted or is_loopback(host)):
        raise ValueError(f"{url} is not encrypted, and the router has --tls-authority: give https://")
    return Upstream(host, port, trust.tls if is_encrypted else None)


def replicas_of(
    urls: Sequence[str],
    routing: Routing,
    headers: HeaderLines,
    learned: Learned,
    models: FleetModels,
    trust: ReplicaTrust = NO_PROOFS,
) -> list[FleetReplica]:
    """Return the replicas at these addresses; raises ValueError for one that is no address."""
    if len({each.rstrip("/") for each in urls}) < len(urls):
        raise ValueError("an address appears twice among --replica; name each once")
    return [
        FleetReplica(number, url, upstream_of(url, trust), routing, headers, learned, models, trust)
        for number, url in enumerate(urls)
    ]
