"""Weights that are fetched while attention runs change no token, and count apart from launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmark.micro import launches
from devices.ascend_limits import answers_file, write_answers
from recipes import machine as machines
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import section, stand_in_alone
from tests.models.test_captured_draws import engine_of, serve

pytestmark = [pytest.mark.npu, stand_in_alone]

WAYS = ["top-p", "greedy", "all three", "greedy"]
LAYERS = 4  # layers of the tiny model


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if verify_npu.sh had found that it gains."""
    machine = start(section("npu"))
    assert isinstance(machine, Npu)
    path = answers_file(tmp_path, machine.product.name, machine.cann, virtual=True)
    write_answers(path, {"prefetches": True})
    monkeypatch.setattr(machines, "ANSWERS", tmp_path)


def counts() -> dict[str, dict[str, int]]:
    result = launches.measure(load(ROOT / "recipes/tiny/npu.yaml", ["device.virtual=true"]))
    return {each["step"]: each for each in result["steps"]}


def test_tokens_are_the_same(request: pytest.FixtureRequest) -> None:
    expected = serve(engine_of(graphs=4, overlap=True), WAYS)
    request.getfixturevalue("fetching")
    assert serve(engine_of(graphs=4, overlap=True), WAYS) == expected


@pytest.mark.slow
def test_each_captured_layer_asks_for_one_which_is_no_launch(request: pytest.FixtureRequest) -> None:
    before = counts()
    assert {each["prefetches"] for each in before.values()} == {0}
    request.getfixturevalue("fetching")
    after = counts()
    for step, found in after.items():
        assert found["prefetches"] == (LAYERS if step.startswith("captured") else 0)
        same = ("a_layer", "in_graph", "outside_graph", "to_device", "waits")
        assert [found[key] for key in same] == [before[step][key] for key in same]


@pytest.mark.usefixtures("fetching")
def test_it_fetches_no_more_than_its_share_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    from models.ops.npu.ops import PREFETCHED_BYTES, prefetch

    asked = []
    monkeypatch.setattr(torch_npu, "npu_prefetch", lambda weight, after, size: asked.append(size))
    side = torch.npu.Stream()
    for rows in (1, PREFETCHED_BYTES, 2 * PREFETCHED_BYTES):
        weight = torch.empty(rows, dtype=torch.int8, device="npu")
        prefetch(weight, weight, side)
    assert asked == [1, PREFETCHED_BYTES, PREFETCHED_BYTES]
