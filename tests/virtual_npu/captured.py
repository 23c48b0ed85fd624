"""Small graphs that the tests of captures and of task groups share."""

from __future__ import annotations

from typing import Any

import torch


def column(value: float = 0.0) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.float32, device="npu")


def waiting(event: Any) -> torch.Stream:
    """Let the current stream wait for an event that is then cleared."""
    stream: torch.Stream = torch.get_device_module("npu").current_stream()
    event.wait(stream)
    event.reset(stream)
    return stream


def grouped(x: torch.Tensor, scale: float) -> tuple[Any, Any, Any]:
    """A graph of one task group, x *= scale, behind an event; the group's handle and the event."""
    npu = torch.get_device_module("npu")
    graph, event = npu.NPUGraph(), npu.ExternalEvent()
    with npu.graph(graph):
        stream = waiting(event)
        npu.graph_task_group_begin(stream)
        x.mul_(scale)
        handle = npu.graph_task_group_end(stream)
    return graph, handle, event
