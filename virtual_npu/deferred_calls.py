"""Defer the operators that cannot run when they are called.

A stream may be captured, may update a task group, or may wait for an event. In these states an operator's
outputs are allocated, and filled with NaN in a capture; its work is kept until the device runs it, on the
same addresses.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from virtual_npu.host_call import HostCall, Originals, swapped, tensors
from virtual_npu.launch_log import LaunchLog, call_kind

CAPTURED, WAITING, UPDATING = 1, 2, 3  # states, as virtual_npu_state returns them
IN_POOL = 2  # a kind of memory, as virtual_npu_holds returns it
EXECUTION_FAILED = 507011  # ACL_ERROR_RT_MODEL_EXECUTE


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """One operator of a graph or a queue, and the addresses that it writes.

    `page_table` is the address of the pages of requests, or None where the operator reads no pages.
    `outside` are the storages that it uses and that no graph's pool holds: the caller has to keep them alive.
    """

    name: str
    run: Callable[[], None]
    writes: tuple[int, ...]
    page_table: int | None
    outside: tuple[StorageWeakRef, ...]
    once: bool
    place: str  # the launch log's place when the operator was called


# The schemas of these operators do not say that they return these arguments as their first results
# (op-plugin, KvRmsNormRopeCacheKernelNpuOpApi.cpp).
RETURNED = {"npu::npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache")}
# The results of these operators have the dtype of this argument; their meta kernels always report bfloat16.
OF_TYPE = {"npu::npu_mla_prolog_v3": "weight_uk"}
PAGE_TABLE = "block_table"  # the argument of all operators that read pages


class DeferredCalls:
    """The deferred operators, by the numbers under which the device knows them."""

    def __init__(self, device: ctypes.CDLL, log: LaunchLog) -> None:
        self.device, self.log = device, log
        self.busy = ctypes.c_int.in_dll(device, "virtual_npu_busy")
        self._waiting: dict[int, DeferredCall] = {}
        self._numbers = itertools.count(1)
        # ctypes keeps no reference to a callback, so this object has to hold both.
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(self._perform)
        self._forget = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(self._drop)
        device.virtual_npu_run_with(self._run)
        device.virtual_npu_forget_with(self._forget)

    def state(self) -> int:
        """Return the state of the current stream; 0 means that an operator runs at once."""
        return int(self.device.virtual_npu_state(stream()))

    def in_group(self) -> bool:
        """Return whether a task group is open in the capture of the current stream."""
        return bool(self.device.virtual_npu_in_group(stream()))

    def check(self, code: int) -> None:
        """Raise RuntimeError with the device's own message where `code` is an error."""
        if code:
            raise RuntimeError(f"{self.device.aclGetRecentErrMsg().decode()} (ACL error {code})")

    def host_waits(self, name: str) -> None:
        """Wait for the work of the current stream. Raises RuntimeError where the host must not wait."""
        if self.busy.value:
            try:
                self.check(self.device.virtual_npu_settle(stream()))
            except RuntimeError as error:
                raise RuntimeError(f"{name} needs the host to wait for the device: {error}") from None

    def defer(self, call: HostCall, args: tuple[Any, ...], kwargs: dict[str, Any], state: int) -> Any:
        """Keep an operator for later, and return its outputs, which are not computed yet.

        Raises RuntimeError for a call that a device could not defer.
        """
        originals: Originals = {}
        on_host, named = call.to_host(args, kwargs, originals)
        if call.is_aten and call.name != "aten::copy_" and call.of_host(originals):
            raise RuntimeError(
                f"virtual NPU: {call.name} reads a tensor of the host, and cannot wait its turn with it"
            )
        # A deferred copy reads its host side when it runs; other operators read it when they are called.
        if call.name != "aten::copy_":
            frozen = {key: view.clone() for key, (view, each) in originals.items() if each is view}
            on_host, named = swapped(on_host, frozen), swapped(named, frozen)
        if call.captured is not None and state == CAPTURED:
            call.captured(*on_host, **named)
        result = _outputs(call, on_host, named, originals)
        ours = {id(each) for _, each in originals.values()}
        places = [call.memory.view(each) for each in tensors(result) if id(each) not in ours]
        # Tasks that a queue runs before this one may still read the memory allocated here.
        if state == CAPTURED:
            for each in places:
                poison(each)

        def run() -> None:
            done = call.perform(on_host, named, originals_of_run)
            fresh = [each for each in tensors(done) if id(each) not in originals_of_run]
            if len(fresh) != len(places) or any(a.shape != b.shape for a, b in zip(fresh, places)):
                raise RuntimeError(f"{call.name} made {[tuple(each.shape) for each in fresh]} in a replay")
            for place, each in zip(places, fresh):
                place.copy_(each)

        # Only views are kept: a graph knows addresses and keeps no tensor alive.
        originals_of_run: Originals = {key: (view, view) for key, (view, _) in originals.items()}
        written = [each for each in tensors(result) if not each.is_cpu]
        # The allocator reuses memory in stream order, so a queued task may use memory that its caller has
        # freed.
        outside = tuple(
            self._outside(each)
            for _, each in originals.values()
            if state != WAITING and not each.is_cpu and self._kept(each)
        )
        self._submit(
            DeferredCall(
                call.name,
                run,
                tuple(each.data_ptr() for each in written),
                _page_table(call, args, kwargs),
                outside,
                state == WAITING,
                self.log.place,
            ),
            state,
        )
        return result if call.num_returns else None

    def _submit(self, deferred: DeferredCall, state: int) -> None:
        if state == UPDATING:
            deferred = replace(deferred, place=self._updated(deferred).place)
        number = next(self._numbers)
        self._waiting[number] = deferred
        self.check(self.device.virtual_npu_submit(stream(), number))

    def _updated(self, deferred: DeferredCall) -> DeferredCall:
        """Return the captured call that this update replaces. Raises RuntimeError where it may not."""
        old = self._waiting.get(self.device.virtual_npu_replaced(stream()))
        if old is None:
            raise RuntimeError(
                f"virtual NPU: the update calls {deferred.name}, and its task group has no operator left"
            )
        if old.name != deferred.name:
            raise RuntimeError(
                f"virtual NPU: the update calls {deferred.name} where its task group holds {old.name}"
            )
        if old.writes != deferred.writes:
            raise RuntimeError(
                f"virtual NPU: the update of {old.name} writes elsewhere than the captured call, and what"
                " follows in the graph would read the old place: use the .out form with the captured outputs"
            )
        if old.page_table != deferred.page_table:
            raise RuntimeError(
                f"virtual NPU: the update of {old.name} gives another {PAGE_TABLE} than the captured call,"
                " after which windowed models answered garbled text (vllm-ascend #8508): write the pages into"
                " the captured tensor, and update lengths alone"
            )
        return old

    def _kept(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return address != 0 and self.device.virtual_npu_holds(address) != IN_POOL

    def _outside(self, tensor: Tensor) -> StorageWeakRef:
        return StorageWeakRef(tensor.untyped_storage())

    def _perform(self, number: int) -> int:
        deferred = self._waiting[number]
        try:
            if any(each.expired() for each in deferred.outside):
                raise RuntimeError(
                    "it uses a tensor that is freed: a graph keeps addresses, and the device"
                    " would read or write whatever lies there now. Keep the tensor as long as the graph"
                )
            deferred.run()
            if not deferred.once:
                self.log.note(call_kind(deferred.name), deferred.name, deferred.place, in_graph=True)
        except Exception as error:  # noqa: BLE001 - it goes through C, and is raised again beyond
            self.device.virtual_npu_say(f"virtual NPU: {deferred.name}: {error}".encode())
            return EXECUTION_FAILED
        finally:
            if deferred.once:
                self._drop(number)
        return 0

    def _drop(self, number: int) -> None:
        self._waiting.pop(number, None)


def stream() -> int:
    """Return the current stream's handle, without the objects that torch.npu makes of it in 30 us."""
    import torch_npu  # here, since it brings CANN

    handle: int = torch_npu._C._npu_getCurrentRawStream(torch_npu._C._npu_getDevice())
    return handle


def _page_table(call: HostCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the address of the page table among the arguments; None where there is none."""
    table = call.argument(PAGE_TABLE, args, kwargs)
    return table.data_ptr() if isinstance(table, Tensor) else None


def poison(view: Tensor) -> None:
    """Fill an output that is not computed yet with values that cannot be mistaken for a result."""
    if view.is_floating_point() or view.is_complex():
        view.fill_(float("nan"))
    elif view.dtype != torch.bool:
        view.fill_(torch.iinfo(view.dtype).max)


def _outputs(call: HostCall, on_host: list[Any], named: dict[str, Any], originals: Originals) -> Any:
    """Return the results to be: arguments that are written, and new tensors as the meta kernel says.

    The meta kernel also refuses arguments that do not fit together, as the operator itself would.
    """
    given = call.returned(on_host, named)
    if given is not None and (call.resized or not call.is_aten):
        return call.to_device(given, originals)
    # A capture calls the same operators on the same shapes for each layer, and a meta kernel takes as long as
    # the operator itself
    kind = _kind((on_host, *named.items()))
    if kind in call.made:
        made = call.made[kind]
        return call.to_device(given if made is None else made, originals)
    metas = {key: _meta(view) for key, (view, _) in originals.items()}
    meta = torch.device("meta")
    placed: list[Any] = [meta if isinstance(each, torch.device) else each for each in swapped(on_host, metas)]
    named = {
        name: meta if isinstance(each, torch.device) else each for name, each in swapped(named, metas).items()
    }
    try:
        result = call.operator(*placed, **named)
    except NotImplementedError as error:
        if given is not None:
            return call.to_device(given, originals)
        raise RuntimeError(
            f"virtual NPU: {call.name} cannot wait its turn, for the shapes of its outputs are not known"
            f" before it runs: {str(error).splitlines()[0]}"
        ) from None
    if call.name in RETURNED:
        arguments = {each.name: value for each, value in zip(call.operator._schema.arguments, placed)} | named
        same = [arguments[name] for name in RETURNED[call.name]]
        result = (*same, *result[len(same) :])
    if call.name in OF_TYPE:
        arguments = {each.name: value for each, value in zip(call.operator._schema.arguments, placed)} | named
        dtype = arguments[OF_TYPE[call.name]].dtype
        result = tuple(each.to(dtype) if each.dtype == torch.bfloat16 else each for each in result)
    arguments_of = {id(each): key for key, each in metas.items()}
    sources = [arguments_of.get(id(each)) for each in tensors(result)]
    if not any(sources):
        call.made[kind] = result
    elif given is not None and sources == [id(each) for each in tensors(given)]:
        call.made[kind] = None
    return call.to_device(
        result, {id(metas[key]): (metas[key], each) for key, (_, each) in originals.items()}
    )


def _kind(value: Any) -> Any:
    """All of an argument that a meta kernel can see, which knows no elements."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return type(value), value  # 1, 1.0 and True are equal, and each has its own results


def _meta(view: Tensor) -> Tensor:
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
