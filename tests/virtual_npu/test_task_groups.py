"""A task group of a graph takes new arguments between replays, in an order that the device cannot mistake."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.virtual_npu.captured import column, grouped, waiting

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


def test_a_task_group_takes_new_arguments():
    x, updates = column(1), torch.npu.Stream()
    graph, handle, event = grouped(x, 2.0)
    expected = 1.0
    for scale in (3.0, 5.0):
        graph.replay()  # it waits for the update
        with torch.npu.stream(updates):
            torch.npu.graph_task_update_begin(updates, handle)
            x.mul_(scale)
            torch.npu.graph_task_update_end(updates)
            event.record(updates)
        expected *= scale
        assert x.tolist() == [expected] * 4


def send(updates, handle, x, scale: float, event) -> None:
    """Update the task group to x *= scale, and let the graph go on."""
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        x.mul_(scale)
        torch.npu.graph_task_update_end(updates)
        event.record(updates)


@pytest.mark.parametrize("way", ["stream", "event", "copy", "device", "on the device"])
def test_a_task_group_is_updated_again_once_its_last_run_was_waited_for(way: str):
    x, updates, done = column(1), torch.npu.Stream(), torch.npu.Event()
    graph, handle, event = grouped(x, 2.0)
    stream = torch.npu.current_stream()
    waits = {
        "stream": stream.synchronize,
        "event": done.synchronize,
        "copy": x.tolist,
        "device": torch.npu.synchronize,
        "on the device": lambda: updates.wait_stream(stream),
    }
    for scale in (3.0, 5.0):
        done.record(stream)
        waits[way]()
        graph.replay()
        send(updates, handle, x, scale, event)
    assert x.tolist() == [15.0] * 4


def test_a_task_group_whose_last_run_nobody_waited_for_is_not_updated():
    x, updates = column(1), torch.npu.Stream()
    graph, handle, event = grouped(x, 2.0)
    graph.replay()
    send(updates, handle, x, 3.0, event)
    graph.replay()
    with pytest.raises(RuntimeError, match="its last replay may still read the old arguments"):
        send(updates, handle, x, 5.0, event)
    event.record(torch.npu.Stream())
    assert x.tolist() == [9.0] * 4  # the arguments are those of the last update


def test_an_update_that_waits_for_the_replay_that_waits_for_it_hangs():
    x, updates = column(1), torch.npu.Stream()
    graph, handle, event = grouped(x, 2.0)
    graph.replay()
    updates.wait_stream(torch.npu.current_stream())  # it would be right before the replay
    send(updates, handle, x, 3.0, event)
    with pytest.raises(RuntimeError, match="on the device this hangs"):
        torch.npu.synchronize()
    event.record(torch.npu.Stream())
    assert x.tolist() == [2.0] * 4  # the update takes its turn, after the replay


def test_work_that_a_test_leaves_behind_is_dropped_and_said(device):
    x, updates = column(1), torch.npu.Stream()
    graph, handle, _ = grouped(x, 2.0)
    graph.replay()
    torch.npu.graph_task_update_begin(updates, handle)
    with torch.npu.stream(updates):
        x.mul_(3)
    assert device.abandon() == 2
    assert device.abandon() == 0
    torch.npu.synchronize()
    assert x.tolist() == [1.0] * 4


def test_an_update_that_nothing_orders_before_its_use_is_refused():
    x, updates, graph = column(1), torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        x.mul_(2)
        handle = torch.npu.graph_task_group_end(stream)
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        x.mul_(3)
        with pytest.raises(RuntimeError, match="while a task group of it is being updated"):
            graph.replay()
        torch.npu.graph_task_update_end(updates)
    with pytest.raises(RuntimeError, match="nothing orders before it"):
        graph.replay()
    torch.npu.current_stream().wait_stream(updates)
    graph.replay()
    assert x.tolist() == [3.0] * 4


def test_an_update_is_of_the_same_operators_at_the_same_places():
    x, updates = column(1), torch.npu.Stream()
    graph, handle, event = grouped(x, 2.0)
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        with pytest.raises(RuntimeError, match="where its task group holds aten::mul_"):
            x.add_(1)
        with pytest.raises(RuntimeError, match="writes elsewhere"):
            torch.empty_like(x).mul_(2)
        with pytest.raises(RuntimeError, match="holds 1 operators and its update 0"):
            torch.npu.graph_task_update_end(updates)
    event.record(updates)
    graph.replay()
    assert x.tolist() == [2.0] * 4  # the arguments are those of the capture


def test_a_handle_of_no_graph_is_refused():
    graph, handle, _ = grouped(column(1), 2.0)
    del graph
    gc.collect()
    stream = torch.npu.Stream()
    with pytest.raises(RuntimeError, match="no living graph has"):
        torch.npu.graph_task_update_begin(stream, handle)


def test_a_running_replay_is_not_updated_behind_its_back():
    x, graph, first, second = (
        column(1),
        torch.npu.NPUGraph(),
        torch.npu.ExternalEvent(),
        torch.npu.ExternalEvent(),
    )
    with torch.npu.graph(graph):
        stream = waiting(first)
        torch.npu.graph_task_group_begin(stream)
        x.mul_(2)
        handle = torch.npu.graph_task_group_end(stream)
        waiting(second)
    updates = torch.npu.Stream()
    graph.replay()
    first.record(updates)  # the group has run; the graph waits for the second event
    with pytest.raises(RuntimeError, match="has already begun or done"):
        torch.npu.graph_task_update_begin(updates, handle)
    second.record(updates)
    assert x.tolist() == [2.0] * 4


def attention(kv_lens: list[int]) -> dict[str, object]:
    """Two decodes over pages of 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(*shape, generator=generator).half().npu() for shape in [(2, 4, 128), *[(6, 128, 256)] * 2]
    ]
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    return dict(zip(("query", "key", "value"), drawn)) | {
        "atten_mask": mask.npu(),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": kv_lens,
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="npu"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.1,
        "input_layout": "TND",
        "block_size": 128,
        "sparse_mode": 3,
    }


def test_torch_npu_updates_attention_by_itself():
    import torch_npu

    call, graph = attention([1, 1]), torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        attended = torch_npu.npu_fused_infer_attention_score(**call)[0]
    for kv_lens in ([100, 200], [256, 3]):
        graph.replay()
        graph.update([{"actual_seq_lengths_kv": kv_lens}])
        torch.npu.synchronize()
        expected = torch_npu.npu_fused_infer_attention_score(**call | {"actual_seq_lengths_kv": kv_lens})[0]
        assert torch.equal(attended, expected)


@pytest.mark.parametrize("is_named", [True, False])
def test_an_update_of_attention_keeps_the_page_table_that_was_captured(is_named: bool):
    """Pages change in the captured tensor; with another tensor, windowed models were garbled."""
    import torch_npu

    def attend(call: dict[str, object]) -> None:
        named = call if is_named else {}
        torch_npu._npu_paged_attention(*(() if is_named else call.values()), **named)

    call = paged_attention()
    other = call | {"block_table": call["block_table"].clone()}
    graph, updates = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        attend(call)
        handle = torch.npu.graph_task_group_end(stream)
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        with pytest.raises(RuntimeError, match="gives another block_table than the captured call"):
            attend(other)
        attend(call)
        torch.npu.graph_task_update_end(updates)


def paged_attention() -> dict[str, object]:
    """One decode over a page of 16 tokens, whose length lies on the host."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 2, 64), "key_cache": (4, 16, 2, 64), "value_cache": (4, 16, 2, 64)}
    drawn = {name: torch.randn(size, generator=generator).half().npu() for name, size in shapes.items()}
    return drawn | {
        "num_kv_heads": 2,
        "num_heads": 2,
        "scale_value": 0.125,
        "block_table": torch.tensor([[1]], dtype=torch.int32, device="npu"),
        "context_lens": torch.tensor([3], dtype=torch.int32),
        "out": torch.empty_like(drawn["query"]),
    }


def test_lengths_on_the_host_are_captured_in_a_task_group_as_they_are():
    import torch_npu

    call = paged_attention()
    torch_npu._npu_paged_attention(**call)
    expected = call["out"].clone()
    with pytest.raises(ValueError, match="task-group"), torch.npu.graph(torch.npu.NPUGraph()):
        torch_npu._npu_paged_attention(**call)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        torch_npu._npu_paged_attention(**call)
        torch.npu.graph_task_group_end(stream)
    call["context_lens"].fill_(9)
    graph.replay()
    assert torch.equal(call["out"], expected)
