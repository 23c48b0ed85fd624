"""Calls of CANN itself, with arguments that torch_npu checks before or never sends, are refused by name."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.virtual_npu.captured import column
from virtual_npu import VirtualDevice

pytestmark = pytest.mark.npu

FLOAT32, NO_TYPE, SUM = 4, 12, 0
HOST_TO_HOST = 0
ROOT_INFO_BYTES = 4108


def stream() -> ctypes.c_void_p:
    """The next stream of torch's pool."""
    return ctypes.c_void_p(torch.npu.Stream().npu_stream)


def said(device: VirtualDevice, call: Callable[[], int]) -> str:
    """Why the device refuses a call; nothing where it does not."""
    device.library.aclGetRecentErrMsg()  # An earlier test may have left a message.
    code, why = call(), str(device.library.aclGetRecentErrMsg().decode())
    assert bool(code) == bool(why), (code, why)
    return why.removeprefix("virtual NPU: ")


@contextlib.contextmanager
def communicator(device: VirtualDevice, size: int) -> Iterator[list[ctypes.c_void_p]]:
    """The handles of its ranks, which are threads of this process."""
    library, info = device.library, ctypes.create_string_buffer(ROOT_INFO_BYTES)
    handles = [ctypes.c_void_p() for _ in range(size)]
    assert library.HcclGetRootInfo(info) == 0

    def join(rank: int) -> int:
        return int(library.HcclCommInitRootInfo(size, info, rank, ctypes.byref(handles[rank])))

    with ThreadPoolExecutor(size) as threads:
        assert [*threads.map(join, range(size))] == [0] * size
    yield handles
    for each in handles:
        library.HcclCommDestroy(each)


def test_counts_in_which_two_ranks_differ_are_refused_on_all(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 sends and expects what the others say, and would wait for them."""
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", str(PATIENCE_S))
    one_each = [1, 1, 1]
    sent, streams = [[1, 2, 1], one_each, one_each], [stream() for _ in one_each]

    def exchange(rank: int) -> str:
        to, of_each, offsets = (
            (ctypes.c_uint64 * 3)(*values) for values in (sent[rank], one_each, [0, 3, 6])
        )
        source, target = (ctypes.c_float * 9)(), (ctypes.c_float * 9)()
        sends, receives = (source, to, offsets, FLOAT32), (target, of_each, offsets, FLOAT32)
        call = device.library.HcclAlltoAllV
        return said(device, lambda: call(*sends, *receives, handles[rank], streams[rank]))

    with communicator(device, 3) as handles, ThreadPoolExecutor(3) as threads:
        refused = [*threads.map(exchange, range(3))]
    assert refused == ["rank 1 expects 1 elements of rank 0, which sends 2: on the device this hangs"] * 3


def test_a_replay_after_its_communicator_is_destroyed_is_refused(device: VirtualDevice) -> None:
    x, graph = column(3.0), torch.npu.NPUGraph()
    library, data, count = device.library, ctypes.c_void_p(x.data_ptr()), ctypes.c_uint64(x.numel())
    with communicator(device, 1) as (handle,):
        with torch.npu.graph(graph):
            current = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
            last = FLOAT32, SUM, handle, current
            assert not said(device, lambda: library.HcclAllReduce(data, data, count, *last))
        graph.replay()
        assert x.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match=r"all_reduce of 4 x float32 by sum in communicator .*destroyed"):
        graph.replay()
    graph.reset()
    again = said(device, lambda: library.HcclCommDestroy(handle))
    assert re.fullmatch(r"communicator /virtual-hccl-\S+ is destroyed twice", again)


def test_what_leads_outside_of_a_communicator_is_refused(device: VirtualDevice) -> None:
    library, data, none = device.library, (ctypes.c_float * 4)(), ctypes.c_void_p()
    count, where = ctypes.c_uint64(4), stream()
    no_type = "the virtual HCCL has no elements of type 12"
    no_rank = "a communicator of 1 ranks has no rank 1"

    def grouped(handle: ctypes.c_void_p) -> int:
        assert library.HcclGroupStart() == library.HcclSend(data, count, FLOAT32, 1, handle, where) == 0
        return int(library.HcclGroupEnd())

    with communicator(device, 1) as (handle,):
        last = handle, where
        for call, why in (
            (lambda: library.HcclSend(data, count, NO_TYPE, 0, *last), no_type),
            (lambda: library.HcclRecv(data, count, NO_TYPE, 0, *last), no_type),
            (lambda: library.HcclSend(data, count, FLOAT32, 1, *last), no_rank),
            (lambda: library.HcclRecv(data, count, FLOAT32, 1, *last), no_rank),
            (lambda: grouped(handle), no_rank),
            (lambda: library.HcclBroadcast(data, count, FLOAT32, 1, *last), no_rank),
            (lambda: library.HcclBatchSendRecv(none, 0, *last), ""),
        ):
            assert said(device, call) == why


def test_copies_and_fills_have_room_and_do_not_stop_a_capture(device: VirtualDevice) -> None:
    library, there, here, where = device.library, (ctypes.c_char * 8)(), (ctypes.c_char * 8)(), stream()
    room = ctypes.c_size_t(4)

    def at_once(count: int) -> list[str]:
        last = ctypes.c_size_t(count)
        copy = said(device, lambda: library.aclrtMemcpy(there, room, here, last, HOST_TO_HOST))
        return [copy, said(device, lambda: library.aclrtMemset(there, room, 1, last))]

    def sent(count: int) -> list[str]:
        last = ctypes.c_size_t(count)
        copy = said(device, lambda: library.aclrtMemcpyAsync(there, room, here, last, HOST_TO_HOST, where))
        return [copy, said(device, lambda: library.aclrtMemsetAsync(there, room, 2, last, where))]

    assert at_once(5) == sent(5) == ["5 bytes are written to a place of 4"] * 2
    assert at_once(4) == ["", ""]
    assert there.raw == b"\1\1\1\1\0\0\0\0"
    assert sent(4) == ["", ""]
    assert there.raw == b"\2\2\2\2\0\0\0\0"
    with torch.npu.graph(torch.npu.NPUGraph()):
        in_capture = at_once(4)
    assert in_capture == [f"a synchronous {what} during a capture" for what in ("copy", "fill")]
