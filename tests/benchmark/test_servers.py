"""Servers and workers that a benchmark starts are measured as they should be, and end with it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmark.processes import leaving_at_signals, process_pool, serving
from benchmark.serve import router
from benchmark.serve.overload import LoadOutcome, PatientClient
from benchmark.workloads.synthetic import lengths
from scripts.benchmark import main
from tests.patience import PATIENCE_S
from tests.serving.server import TINY


@pytest.mark.slow
def test_a_router_and_the_least_proxy_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--turns", "1", "--requests", "20", "--pieces", "20", "--every-ms", "1")
    main(["serve", "--router-cost", *small, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [*found["ways"]] == ["server", "bytes", "router"]
    for way in found["ways"].values():
        assert 0 < way["first_p50_ms"] <= way["first_p99_ms"]
        assert 0 < way["request_us"] < 1e6
    ours, least = (found["ways"][name]["request_us"] for name in ("router", "bytes"))
    assert found["router_over_bytes"]["request_us"] == [pytest.approx(ours / least, abs=0.01)]
    router.print_table(found)
    assert "\nrouter / bytes, a request: " in capsys.readouterr().out


@pytest.mark.slow
def test_who_is_accepted_under_overload_is_answered_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("--minutes", "0.02", "--accepted", "4", "--output-tokens", "64", "--json")
    main(["serve", "--overload", TINY, "server.spare_engine=false", *small])
    found = json.loads(capsys.readouterr().out)["overload"]
    assert found["clients"] == 40
    assert found["whole"] == found["accepted"] > 0
    assert found["refused"] > 0
    assert 0 <= found["refusal_p50_ms"] <= found["refusal_p99_ms"] <= found["refusal_most_ms"]
    assert found["failed"] == found["left"] == 0


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        (b"", (0, 0, 1)),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n", (0, 1, 0)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata:", (1, 0, 0)),
    ],
)
def test_a_client_comes_again_after_a_broken_connection(sent: bytes, counted: tuple[int, ...]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(sent)
        writer.close()

    async def ask() -> tuple[float, LoadOutcome]:
        found = LoadOutcome()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = "http://{}:{}".format(*server.sockets[0].getsockname())
            async with aiohttp.ClientSession(url) as http:
                patient = PatientClient(http, 0, argparse.Namespace(output_tokens=lengths("8")))
                return await patient._ask(patient._body(64), found), found

    pause_s, found = asyncio.run(ask())
    assert pause_s == 1.0
    assert (found.accepted, found.refused, found.failed) == counted
    assert not found.whole


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("print('why\\n\\nShutting down'); exit(3)", "ended with status 3; it last said: why "),
        (
            "import time; print('listening at http://127.0.0.1:1, model x', flush=True); time.sleep(60)",
            "takes no requests after 0.2 s",
        ),
    ],
)
def test_a_server_that_does_not_come_up_is_told_and_ended(tmp_path: Path, script: str, told: str) -> None:
    timeout_s = PATIENCE_S if "ended" in told else 0.2
    with (
        pytest.raises(ValueError, match=rf"^ours: the server {told}"),
        serving("ours", [sys.executable, "-c", script], tmp_path / "a" / "server.log", timeout_s),
    ):
        pytest.fail("it was never ready")


def interrupted(number: int) -> None:
    with process_pool(2) as pool:
        for _ in range(4):
            pool.submit(time.sleep, 600)
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_does_not_wait_for_the_work(number: int, error: type[BaseException]) -> None:
    began_s = time.monotonic()
    # What would end the tests where the pool does not heed it
    ends = signal.default_int_handler if number == signal.SIGINT else lambda *_: pytest.fail("not heeded")
    with handled(number, ends), pytest.raises(error):
        interrupted(number)
    assert time.monotonic() - began_s < 300, "the work takes 1,200 s"
    assert not multiprocessing.active_children()


def test_the_end_of_a_terminal_is_ignored_under_nohup() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN), leaving_at_signals():
        os.kill(os.getpid(), signal.SIGHUP)


def test_work_that_ends_has_its_results() -> None:
    with process_pool(2) as pool:
        assert list(pool.map(abs, range(-3, 1))) == [3, 2, 1, 0]
