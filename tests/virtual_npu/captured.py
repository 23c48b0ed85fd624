"""Which small graphs do the tests of captures and of task groups share?"""

from __future__ import annotations

import torch


def column(value: float = 0.0) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.float32, device="npu")


def waiting(event) -> torch.npu.Stream:
    """Let the current stream wait for an event that is then cleared."""
    stream = torch.npu.current_stream()
    event.wait(stream)
    event.reset(stream)
    return stream


def grouped(x, scale: float):
    """A graph of one task group, x *= scale, behind an event; the group's handle and the event."""
    graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        stream = waiting(event)
        torch.npu.graph_task_group_begin(stream)
        x.mul_(scale)
        handle = torch.npu.graph_task_group_end(stream)
    return graph, handle, event
