"""A graph runs when it is replayed, on the addresses of its capture; a device's refusals are ours."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.virtual_npu.captured import column, waiting

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


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


def test_memory_is_given_on_while_work_that_reads_it_waits():
    gc.collect()  # what earlier tests left would leave another place for `second`
    torch.npu.synchronize()
    x, graph, event = column(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        waiting(event)
        x.add_(1)
    read = column(5)
    address = read.data_ptr()
    graph.replay()
    first = read * 2
    del read
    second = x + 1  # it takes the memory of `read`, as the order of the stream allows
    assert second.data_ptr() == address
    event.record(torch.npu.Stream())
    assert first.tolist() == [10.0] * 4
    assert second.tolist() == [2.0] * 4


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


def test_a_wait_is_for_the_last_record_of_an_event():
    x, graph, gate, again = column(1), torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Event()
    with torch.npu.graph(graph):
        waiting(gate)
        x.mul_(2)
    other, stream = torch.npu.Stream(), torch.npu.current_stream()
    again.record(stream)
    graph.replay()
    again.record(stream)
    with torch.npu.stream(other):
        again.wait(other)
        y = x + 1
    assert not again.query()
    gate.record(torch.npu.Stream())
    torch.npu.synchronize()
    assert again.query()
    assert y.tolist() == [3.0] * 4


def test_a_stream_that_fails_does_not_hold_up_others():
    x, graph, gate = column(1), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    freed = column(1)
    with torch.npu.graph(graph):
        waiting(gate)
        freed.mul_(2)
    del freed
    graph.replay()
    other = torch.npu.Stream()
    other.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(other):
        y = x + 1
    with pytest.raises(RuntimeError, match="uses a tensor that is freed"):
        gate.record(torch.npu.Stream())
    torch.npu.synchronize()
    assert y.tolist() == [2.0] * 4


def test_random_numbers_of_a_replay_are_new():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        drawn = torch.rand(4, device="npu")
    graph.replay()
    before = drawn.clone()
    graph.replay()
    assert not torch.equal(before, drawn)


def test_who_waits_for_ever_is_told_where_the_record_stands():
    main, other = torch.npu.current_stream(), torch.npu.Stream()
    gate, blocked = torch.npu.ExternalEvent(), torch.npu.ExternalEvent()
    gate.wait(main)
    with pytest.raises(RuntimeError, match=r"waits for an event that no stream was told to record"):
        main.synchronize()
    gate.record(main)
    with pytest.raises(RuntimeError, match=r"stands in stream \d+, behind that wait"):
        main.synchronize()
    blocked.wait(other)
    gate.record(other)
    blocked.record(main)
    with pytest.raises(RuntimeError, match=r"stands in stream \d+"):
        other.synchronize()
    blocked.record(torch.npu.Stream())
    main.synchronize()


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
    with (
        torch.npu.stream(torch.npu.current_stream()),  # a capture that cannot begin leaves its own
        pytest.raises(RuntimeError, match="captured streams are held by graphs"),
    ):
        capture(2_048)


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
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
