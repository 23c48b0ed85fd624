"""The router sends each session to the replica that has its pages.

The replicas are servers of the tiny model, and the judge is one that knows all their pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmark.serve import fleet
from benchmark.verbs import BENCHMARKS, chosen, parser_of
from tests.ports import free_port
from tests.serving.server import TINY, Server


@contextmanager
def forked(verb: str, *arguments: str, ready: str = "/ready") -> Iterator[Server]:
    """Start a server or a router as a fork; it stands in for benchmark.processes.started."""
    server = Server(*arguments, verb=verb)
    yield server.ready() if ready else server
    assert server.close() == 0


@pytest.mark.slow
def test_sessions_are_sent_where_their_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "started", forked)
    monkeypatch.setattr(fleet, "THINK_S", 0.0)
    verb = chosen(BENCHMARKS, "serve", ["--fleet"])
    words = f"{TINY} --replicas 2 --rounds 1 --sessions 8 --concurrent 3 --events-port {free_port()}"
    options = parser_of(verb, "benchmark").parse_args(words.split())
    found = fleet.run(options)["fleet"]
    by_pages, by_turns = found["prefix"], found["round_robin"]
    assert by_pages["failed"] == by_turns["failed"] == 0
    assert by_pages["requests"] >= 8
    assert by_pages["of_best"] >= 0.9
    assert by_pages["found"] > by_turns["found"]
