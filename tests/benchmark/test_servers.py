"""Servers and workers that a benchmark starts are measured as they should be, and end with it."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest

from benchmark.processes import process_pool
from scripts.benchmark import main
from tests.serving.server import TINY


@pytest.mark.slow
def test_a_server_with_a_folder_finds_what_one_without_computes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--prompts", "2", "--lengths", "40,100", "--entry-kib", "4", "--json")
    main(["serve", "--tier", TINY, "cache.host_gib=0.05", *small])
    found = json.loads(capsys.readouterr().out)["tier"]
    for length, tokens in (("40", 32), ("100", 96)):
        assert found["ways"]["none"][length]["found"] == 0
        assert found["ways"]["disk"][length]["found"] == 2 * tokens
    assert min(found["stores"]["disk"].values()) > 0


@pytest.mark.slow
def test_a_router_and_bare_proxies_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--turns", "1", "--requests", "20", "--clients", "4", "--pieces", "20", "--every-ms", "1")
    main(["serve", "--router-cost", *small, "--streams", "20,40", "--json"])
    found = json.loads(capsys.readouterr().out)["router"]
    for way in ("server", "bytes", "http", "router"):
        assert (
            0 < found[f"{way}_first_p50_ms"] <= found[f"{way}_whole_p50_ms"] <= found[f"{way}_whole_p99_ms"]
        )
        assert 0 < found[f"{way}_request_us"] < 1e6
    assert found["router_added_first_p50_ms"] == pytest.approx(
        found["router_first_p50_ms"] - found["server_first_p50_ms"], abs=1e-3
    )
    assert found["router_over_http_request_us"] == pytest.approx(
        found["router_request_us"] / found["http_request_us"], rel=1e-2
    )
    assert {*found["streams"]} == {"20", "40"}
    assert min(found["streams"].values()) > 10_000, "KiB of a process with numpy"


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


def test_a_slope_needs_two_numbers() -> None:
    with pytest.raises(ValueError, match="a slope needs two numbers"):
        main(["serve", "--router-cost", "--streams", "5"])


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
