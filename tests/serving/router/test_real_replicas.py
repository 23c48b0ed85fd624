"""The router sends each session to the replica that has its pages.

The replicas are servers of the tiny model, and the judge is one that knows all their pages.
"""

from __future__ import annotations

import socket

import pytest

from benchmark.serve import fleet
from benchmark.verbs import BENCHMARKS, chosen, parser_of


def free_ports(count: int) -> int:
    """The first of so many ports, ten apart, that nobody listens at, nor at those behind them."""
    for first in range(20_000, 30_000, 100):
        ports = [first + 10 * number + at for number in range(count) for at in (0, 1)]
        try:
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


@pytest.mark.slow
def test_sessions_are_sent_where_their_pages_are() -> None:
    verb = chosen(BENCHMARKS, "serve", ["--fleet"])
    sizes = ("--replicas", "2", "--rounds", "1", "--events-port", str(free_ports(2)))
    options = parser_of(verb, "benchmark").parse_args(["recipes/tiny/cpu.yaml", *sizes])
    load = fleet.FleetLoad(
        sessions=16, concurrent=6, systems=4, system_words=100, turn_words=15, answer_tokens=4, think_s=0.1
    )
    found = fleet.measure(options, load)
    by_pages, by_turns = found["prefix"], found["round_robin"]
    assert by_pages["failed"] == by_turns["failed"] == 0
    assert by_pages["requests"] >= 16
    assert by_pages["of_best"] >= 0.9
    assert by_pages["found"] > by_turns["found"]
