"""The launch log counts launches, copies, waits and updates, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from virtual_npu import VirtualDevice

pytestmark = pytest.mark.npu


def counted(device: VirtualDevice, work) -> Counter[tuple[str, bool]]:
    """How often the work asked for each kind, outside a graph and in it."""
    with device.log.reading() as asked:
        work()
    return Counter((each.kind, each.in_graph) for each in asked)


def test_an_operator_is_a_launch_and_a_view_is_none(device: VirtualDevice) -> None:
    x = torch.ones(4, 6, device="npu")
    assert counted(device, lambda: x[1:3].t().unsqueeze(0)) == {}
    assert counted(device, lambda: torch.empty_like(x)) == {}
    assert counted(device, lambda: x + 1) == {("launch", False): 1}
    assert counted(device, lambda: x.t().contiguous()) == {("launch", False): 1}
    assert counted(device, lambda: x.bfloat16()) == {("launch", False): 1}


def test_a_copy_waits_unless_it_is_pinned_and_asked_not_to(device: VirtualDevice) -> None:
    host = torch.ones(4)
    pinned, there = host.pin_memory(), torch.ones(4, device="npu")
    assert counted(device, lambda: pinned.to("npu", non_blocking=True)) == {("to device", False): 1}
    assert counted(device, lambda: host.to("npu")) == {("to device", False): 1, ("wait", False): 1}
    assert counted(device, there.cpu) == {("to host", False): 1, ("wait", False): 1}
    assert counted(device, lambda: there[0].item()) == {("to host", False): 1, ("wait", False): 1}


def test_the_host_waits_for_streams_and_events(device: VirtualDevice) -> None:
    event = torch.npu.Event()
    event.record()
    assert counted(device, event.synchronize) == {("wait", False): 1}
    assert counted(device, torch.npu.current_stream().synchronize) == {("wait", False): 1}
    assert counted(device, lambda: torch.npu.Stream().wait_event(event)) == {}


def test_a_graph_counts_when_it_is_replayed_under_the_names_of_its_capture(device: VirtualDevice) -> None:
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()

    def capture() -> None:
        with torch.npu.graph(graph):
            device.log.place = "layer"
            y = x * 2
            device.log.place = ""
            y + 1

    assert not [kind for kind, _ in counted(device, capture) if kind == "launch"]
    with device.log.reading() as asked:
        graph.replay()
    launches = [(each.name, each.place) for each in asked if each.kind == "launch" and each.in_graph]
    assert launches == [("aten::mul.Tensor", "layer"), ("aten::add.Tensor", "")]
    assert [each.name for each in asked if each.kind == "replay"] == ["graph"]
