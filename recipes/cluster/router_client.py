"""Call the router in front of a set of replicas (`serving.router.server`)."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from borders.refusal import one_line

_ANSWER_S = 2.0
_MOST_BYTES = 2**24  # the most bytes of an answer; a router has at most 4,096 replicas
Answer = TypeVar("Answer")
Count = Annotated[int, Meta(ge=0, le=2**53)]


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a router reports about one replica."""

    state: str
    leaves: bool
    queued_tokens: Count
    requests: Count


class _Row(ReplicaReport, frozen=True):
    url: str


class _Fleet(msgspec.Struct, frozen=True):
    replicas: list[_Row]
    waiting_tokens: Count


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a router reports: each replica by its URL, and the prompt tokens that wait for a turn."""

    replicas: dict[str, ReplicaReport]
    waiting_tokens: int


class RouterClient:
    """A client of the router at a URL, with the environment's API_KEY; `say` gets each new trouble once."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        kind, _, rest = url.partition("://")
        if kind != "http" or not rest:
            raise ValueError(f"--router {url} is not of the form http://HOST:PORT")
        self._url = url.rstrip("/")
        self._say = say
        self._trouble = ""

    def report(self) -> FleetReport | None:
        """Return what the router knows now, or None where it does not answer."""
        answer = self._ask("GET", "/fleet", _Fleet)
        if answer is None:
            return None
        return FleetReport({row.url: row for row in answer.replicas}, answer.waiting_tokens)

    def add(self, url: str) -> None:
        """Announce a replica, which gets requests as soon as it is ready."""
        self._ask("POST", f"/fleet/add?{url}", msgspec.Raw)

    def remove(self, url: str) -> None:
        """Let a replica leave: it gets no new requests, and is forgotten when its last one has ended."""
        self._ask("POST", f"/fleet/remove?{url}", msgspec.Raw)

    def _ask(self, method: str, path: str, kind: type[Answer]) -> Answer | None:
        key = os.environ.get("API_KEY", "").strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(
            self._url + path, method=method, headers=headers, data=b"" if method == "POST" else None
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                answer = msgspec.json.decode(_bounded(response), type=kind)
        except urllib.error.HTTPError as error:
            with error:
                trouble = f"{error.code}: {error.read(500).decode(errors='replace')}"
        # No connection, no HTTP, or an answer that is not understood
        except (
            *(OSError, ValueError, http.client.HTTPException),
            *(msgspec.MsgspecError, RecursionError),
        ) as error:
            trouble = str(error)
        else:
            self._trouble = ""
            return answer
        trouble = one_line(trouble)
        if trouble != self._trouble:
            self._say(f"the router at {self._url} does not take {method} {path}: {trouble}")
        self._trouble = trouble
        return None


def _bounded(response: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer; raises ValueError for one that is too long, or takes too long."""
    body, until_s = b"", time.monotonic() + _ANSWER_S
    while part := response.read1(2**16):
        body += part
        if len(body) > _MOST_BYTES or time.monotonic() > until_s:
            raise ValueError(f"its answer has more than {_MOST_BYTES:,} bytes, or takes {_ANSWER_S:g} s")
    return body
