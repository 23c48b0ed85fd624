"""Does the benchmark of the router measure what goes through it, and refuse what it cannot?"""

from __future__ import annotations

import json

import pytest

from scripts.benchmark import main


@pytest.mark.slow
def test_a_router_and_a_bare_proxy_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--turns", "1", "--requests", "20", "--clients", "4", "--streams", "20,40")
    main(["serve", "--router-cost", *small, "--json"])
    found = json.loads(capsys.readouterr().out)["router"]
    for way in ("server", "proxy", "router"):
        assert 0 < found[f"{way}_p50_ms"] <= found[f"{way}_p99_ms"]
    assert found["router_added_p50_ms"] == pytest.approx(
        found["router_p50_ms"] - found["server_p50_ms"], abs=1e-3
    )
    assert 0 < found["router_cpu_ms"] < 1000
    assert {*found["streams"]} == {"20", "40"}
    assert min(found["streams"].values()) > 10_000, "KiB of a process with numpy"


def test_a_slope_needs_two_numbers() -> None:
    with pytest.raises(ValueError, match="a slope needs two numbers"):
        main(["serve", "--router-cost", "--streams", "5"])
