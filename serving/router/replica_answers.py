"""Read what a replica reports about itself: `/server_info`, `/v1/models` and `/metrics`.

A replica may be another kind of server, of which less is known, or one that is broken or lies. So each answer
is read up to a bound of bytes and decoded into types with bounds, and what cannot be read raises Unreadable,
whose text says which answer it was.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from borders.field_types import LAST_ID, LONGEST_NAME
from serving.router.upstream import HeaderLines, Upstream

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
