"""A graph runs when it is replayed, on the addresses of its capture; a device's refusals are ours."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


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


def test_a_capture_runs_nothing_and_a_replay_all():
    x, graph = column(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x + 1) * 2
    assert y.isnan().all()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [(value + 1) * 2] * 4


def test_graphs_share_a_pool():
    pool, x, graphs = torch.npu.graph_pool_handle(), column(1), []
    for factor in range(3):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=pool):
            y = x * factor
        graphs.append((graph, y))
    for factor, (graph, y) in enumerate(graphs):
        graph.replay()
        assert y.tolist() == [factor] * 4


def test_a_pinned_upload_is_captured_with_its_address():
    x, host, graph = column(), torch.ones(4, pin_memory=True), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.copy_(host, non_blocking=True)
        y = x * 2
    host.fill_(7)
    graph.replay()
    assert y.tolist() == [14.0] * 4


def test_streams_fork_and_join_in_a_capture():
    x, other, graph = column(1), torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        other.wait_stream(main)
        with torch.npu.stream(other):
            y = x * 2
        main.wait_stream(other)
        z = y + 1
    graph.replay()
    assert z.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.sum().item(), "needs the host to wait"),
        (lambda x: x.cpu(), "needs the host to wait"),
        (lambda x: x.copy_(torch.ones(4)), "needs the host to wait"),
        (lambda x: x.nonzero(), "needs the host to wait"),
        (lambda x: x[x > 0], "needs the host to wait"),
        (lambda x: x[torch.tensor([1])], "reads a tensor of the host"),
        (lambda x: x.add_(torch.ones(3, device="npu")), "broadcast"),
        (lambda _: torch.npu.synchronize(), "host waits for the device during a capture"),
        (
            lambda _: torch.npu.current_stream().synchronize(),
            "host waits for a stream that is being captured",
        ),
    ],
)
def test_a_capture_cannot_wait_for_the_device(call, said):
    x = column()
    with pytest.raises(RuntimeError, match=said), torch.npu.graph(torch.npu.NPUGraph()):
        call(x)
    assert (x + 1).tolist() == [1.0] * 4  # and the device goes on


def test_a_freed_input_is_refused():
    x, graph = column(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + 1
    del x
    with pytest.raises(RuntimeError, match="uses a tensor that is freed"):
        graph.replay()
    assert y.isnan().all()


def test_work_behind_an_event_waits_for_it():
    x, graph, event = column(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        waiting(event)
        y = x + 1
    for _ in range(2):  # the graph clears the event for the next time
        graph.replay()
        z = y * 10
        sent = torch.empty(4, pin_memory=True).copy_(z, non_blocking=True)
        with pytest.raises(RuntimeError, match="on the device this hangs"):
            torch.npu.synchronize()
        with pytest.raises(RuntimeError, match="on the device this hangs"):
            z.tolist()
        event.record(torch.npu.Stream())
        torch.npu.synchronize()
        assert z.tolist() == sent.tolist() == [10.0] * 4


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
    assert x.tolist() == [2.0] * 4  # as it was captured


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


def test_random_numbers_of_a_replay_are_new():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        drawn = torch.rand(4, device="npu")
    graph.replay()
    before = drawn.clone()
    graph.replay()
    assert not torch.equal(before, drawn)


@pytest.mark.slow
def test_graphs_run_out_of_streams():
    x, graphs = column(), []

    def capture(most: int) -> None:
        while len(graphs) < most:
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                x.add_(1)
            graphs.append(graph)

    capture(1_800)  # what vllm-ascend asks for at most
    with pytest.raises(RuntimeError, match="captured streams are held by graphs"):
        capture(2_048)


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


def test_a_capture_outside_a_task_group_would_freeze_the_lengths():
    import torch_npu

    call = attention([1, 1])
    with (
        pytest.raises(ValueError, match="capture-form"),
        torch.npu.graph(torch.npu.NPUGraph()),
    ):
        torch_npu.npu_fused_infer_attention_score(**call)


def test_threads_replay_and_allocate_side_by_side():
    x, graph, wrong = column(1), torch.npu.NPUGraph(), []
    with torch.npu.graph(graph):
        y = x * 2

    def replay() -> None:
        for _ in range(100):
            graph.replay()
            torch.npu.synchronize()
            wrong.extend(each for each in y.tolist() if each != 2)

    def allocate() -> None:
        with torch.npu.stream(torch.npu.Stream()):
            for _ in range(100):
                total = torch.ones(64, device="npu").sum().item()
                wrong.extend([total] * (total != 64))
                torch.npu.empty_cache()  # which waits for the device, and holds Python's lock

    threads = [threading.Thread(target=each, daemon=True) for each in (replay, allocate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
