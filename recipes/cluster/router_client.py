"""Call the router in front of a set of replicas (`serving.router.server`)."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a router reports about one replica."""

    state: str
    leaves: bool
    queued_tokens: int
    requests: int


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
        answer = self._ask("GET", "/fleet")
        if answer is None:
            return None
        rows = answer["replicas"]
        names = ("state", "leaves", "queued_tokens", "requests")
        replicas = {row["url"]: ReplicaReport(**{name: row[name] for name in names}) for row in rows}
        return FleetReport(replicas, answer["waiting_tokens"])

    def add(self, url: str) -> None:
        """Announce a replica, which gets requests as soon as it is ready."""
        self._ask("POST", f"/fleet/add?{url}")

    def remove(self, url: str) -> None:
        """Let a replica leave: it gets no new requests, and is forgotten when its last one has ended."""
        self._ask("POST", f"/fleet/remove?{url}")

    def _ask(self, method: str, path: str) -> dict[str, Any] | None:
        key = os.environ.get("API_KEY", "").strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(
            self._url + path, method=method, headers=headers, data=b"" if method == "POST" else None
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                trouble = f"{error.code}: {error.read(500).decode(errors='replace')}"
        except (OSError, ValueError) as error:  # no connection, or an answer that is no JSON
            trouble = str(error)
        else:
            self._trouble = ""
            return answer
        if trouble != self._trouble:
            self._say(f"the router at {self._url} does not take {method} {path}: {trouble}")
        self._trouble = trouble
        return None
