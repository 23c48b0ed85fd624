"""Servers and workers that a benchmark starts are measured as they should be, and end with it."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from benchmark.processes import process_pool, serving
from benchmark.serve import router
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


def interrupted() -> None:
    with process_pool(2) as pool:
        for _ in range(4):
            pool.submit(time.sleep, 600)
        raise KeyboardInterrupt


def test_an_interrupt_does_not_wait_for_the_work() -> None:
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began_s < 300, "the work takes 1,200 s"
    assert not multiprocessing.active_children()


def test_work_that_ends_has_its_results() -> None:
    with process_pool(2) as pool:
        assert list(pool.map(abs, range(-3, 1))) == [3, 2, 1, 0]
