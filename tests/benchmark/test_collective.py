"""Collectives between ranks are timed by size."""

from __future__ import annotations

import json

import pytest

from scripts.benchmark import main

pytestmark = pytest.mark.usefixtures("forked_ranks")

RECIPE = "recipes/tiny/cpu.yaml"
QUICK = ["device.compile=false", "device.threads=1"]


@pytest.mark.slow
def test_collectives_are_timed_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["collective", RECIPE, "parallel.tensor=2", *QUICK, "--sizes", "64,4096", "--repeats", "2", "--json"]
    )
    found = json.loads(capsys.readouterr().out)["collective"]
    assert found["ranks"] == 2
    rows = [(row["method"], row["bytes"]) for row in found["calls"]]
    assert rows == [(name, size) for name in ("all_reduce", "all_gather", "broadcast") for size in (64, 4096)]
    assert all(row["us"] > 0 for row in found["calls"])
    with pytest.raises(ValueError, match=r"parallel\.tensor: one rank waits for nobody; set it to 2 or more"):
        main(["collective", RECIPE])
