"""The router sends each session to the replica that has its pages.

The replicas are servers of the tiny model, and the judge is one that knows all their pages.
"""

from __future__ import annotations

import pytest

from benchmark.serve import fleet
from benchmark.verbs import BENCHMARKS, chosen, parser_of
from tests.ports import free_port
from tests.serving.server import TINY


@pytest.mark.slow
def test_sessions_are_sent_where_their_pages_are() -> None:
    verb = chosen(BENCHMARKS, "serve", ["--fleet"])
    words = f"{TINY} --replicas 2 --rounds 1 --sessions 16 --concurrent 6 --events-port {free_port()}"
    options = parser_of(verb, "benchmark").parse_args(words.split())
    found = fleet.run(options)["fleet"]
    by_pages, by_turns = found["prefix"], found["round_robin"]
    assert by_pages["failed"] == by_turns["failed"] == 0
    assert by_pages["requests"] >= 16
    assert by_pages["of_best"] >= 0.9
    assert by_pages["found"] > by_turns["found"]
