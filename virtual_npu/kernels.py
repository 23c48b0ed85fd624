"""Register the kernels that run when an operator is called on a tensor of npu:0.

An operator of torch runs as the CPU kernel of the same operator on the same bytes; an operator of torch_npu
runs as a Python function given to `implement`. On a stream that captures, waits or updates, `DeferredCalls`
takes the call instead.

Random operators get reproducible numbers from a CPU generator that is seeded from the seed and the offset of
npu:0's generator, so that restoring its state repeats them, as on the device. A real device draws other
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from virtual_npu.deferred_calls import CAPTURED, UPDATING, DeferredCalls
from virtual_npu.host_call import HostCall, Memory
from virtual_npu.launch_log import Kind, LaunchLog, call_kind

STEP = 4  # how far an operator moves its generator's offset; Philox gives four numbers at a time


def seeded(function: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """Let `function`, an operator with these arguments, draw from its generator or from npu:0's own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generator")
        place = next((i for i, each in enumerate(args) if isinstance(each, torch.Generator)), None)
        given = given if place is None else args[place]
        source = given if given is not None else torch.get_device_module("npu").default_generators[0]
        if source.device.type == "cpu":
            raise RuntimeError("Expected a 'npu' device type for generator but found 'cpu'")
        seed, offset = source.initial_seed(), source.get_offset()
        source.set_offset(offset + STEP)
        mixed = hash((seed, offset)) & 0x7FFF_FFFF_FFFF_FFFF
        if "generator" not in names:
            before = torch.get_rng_state()
            try:
                torch.default_generator.manual_seed(mixed)
                return function(*args, **kwargs)
            finally:
                torch.set_rng_state(before)
        twin = torch.Generator().manual_seed(mixed)
        if place is not None:
            args = (*args[:place], twin, *args[place + 1 :])
        else:
            kwargs["generator"] = twin
        return function(*args, **kwargs)

    return run


Kernel = Callable[..., Any]
ITEM = "aten::_local_scalar_dense"
WAITS = "a copy that is not both pinned and non_blocking"

# torch_npu's own kernels stay in use here: they make, view or describe tensors and touch no elements.
KEEP = {
    *(
        "empty.memory_format",
        "empty_strided",
        "empty_like",
        "new_empty_strided",
        "empty_with_format",
        "empty_with_format.names",
    ),
    *("as_strided", "view", "_reshape_alias", "unfold", "squeeze", "squeeze.dim", "unsqueeze"),
    *("view_as_real", "view_as_complex", "resize_", "resize_as_", "record_stream"),
    *("set_", "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset"),
    *("is_pinned", "_pin_memory", "pin_memory", "is_set_to", "_has_compatible_shallow_copy_type"),
}


class Kernels:
    """The kernels of every operator on npu:0, registered as long as this object lives."""

    def __init__(self, memory: Memory, deferred_calls: DeferredCalls, log: LaunchLog) -> None:
        self.memory, self.deferred_calls, self.log = memory, deferred_calls, log
        self._libraries: dict[str, torch.library.Library] = {}

    def register(self) -> int:
        """Register a kernel for each aten operator of the CPU that does not decompose; returns how many."""
        special: dict[str, Kernel] = {"_to_copy": _to_copy, "contiguous": _contiguous, "copy_": self._copy()}
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        count = 0
        for name in torch._C._dispatch_get_all_op_names():
            short = name.removeprefix("aten::")
            if short == name or short in KEEP:
                continue
            decomposes = any(
                has(name, f"Composite{kind}") for kind in ("ImplicitAutograd", "ExplicitAutograd")
            )
            if has(name, "PrivateUse1") or (has(name, "CPU") and not decomposes):
                operator = find(name)
                if operator is not None:  # torch_npu registers some kernels for which torch has no schema
                    self._impl(
                        name, special.get(short) or self._kernel(HostCall(operator, operator, self.memory))
                    )
                    count += 1
        # torch_npu's own kernel would choose one of its fused operators before the device is asked.
        self._impl("aten::scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
        return count

    def implement(self, name: str, function: Kernel, captured: Kernel | None = None) -> None:
        """Implement an operator, such as `npu::npu_rms_norm`, by a Python function of CPU tensors.

        The function is called with the schema's arguments (without defaults), and with CPU views of the same
        bytes for tensors of npu:0, into which it may write. Its result is copied to the device, or is the
        caller's own tensor where it returns an argument. `captured` is called instead while a graph captures
        the operator, when shapes and lists are known but values are not. Raises ValueError for a name that
        torch does not know.
        """
        operator = find(name)
        if operator is None:
            raise ValueError(f"torch_npu has no operator {name}: ask torch.ops for its name")
        self._impl(name, self._kernel(HostCall(operator, function, self.memory, captured)))

    def _kernel(self, call: HostCall) -> Kernel:
        """Return the function that torch calls for an operator."""
        if torch.Tag.nondeterministic_seeded in call.operator.tags:
            call.function = seeded(call.function, {each.name for each in call.operator._schema.arguments})
        deferred_calls, busy, log = self.deferred_calls, self.deferred_calls.busy, self.log
        kind = call_kind(call.name)
        answers_host = call.name.endswith("_get_max_workspace")  # such a call sends nothing to the device

        def run(*args: Any, **kwargs: Any) -> Any:
            if answers_host:
                return call(args, kwargs)
            if call.needs_host(args):
                log.note("wait", call.name)
                if busy.value:
                    deferred_calls.host_waits(call.name)
            elif busy.value and (state := deferred_calls.state()):
                if state != CAPTURED:  # a captured call is counted when it is replayed
                    log.note("update" if state == UPDATING else kind, call.name)
                return deferred_calls.defer(call, args, kwargs, state)
            log.note(*("to host", call.name) if call.name == ITEM else (kind, call.name))
            return call(args, kwargs)

        return run

    def _copy(self) -> Kernel:
        """Return the kernel of copy_, one side of which may lie on the host."""
        call = HostCall(torch.ops.aten.copy_.default, torch.ops.aten.copy_.default, self.memory)
        deferred_calls, log = self.deferred_calls, self.log

        def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not target.numel():
                return target
            host = [each for each in (target, source) if each.is_cpu]
            kind: Kind = "launch" if not host else "to host" if target.is_cpu else "to device"
            if host and not (non_blocking and host[0].is_pinned()):
                log.note("wait", WAITS)
                if deferred_calls.busy.value:
                    deferred_calls.host_waits(WAITS)
            elif deferred_calls.busy.value and (state := deferred_calls.state()):
                if state != CAPTURED:
                    log.note(kind, call.name)
                deferred: Tensor = deferred_calls.defer(call, (target, source), {}, state)
                return deferred
            log.note(kind, call.name)
            call.on_host(target).copy_(call.on_host(source))
            return target

        return copy

    def _impl(self, name: str, kernel: Kernel, key: str = "PrivateUse1") -> None:
        space, _, short = name.partition("::")
        if space not in self._libraries:
            self._libraries[space] = torch.library.Library(space, "IMPL")
        self._libraries[space].impl(short, kernel, key, allow_override=True)


def find(name: str) -> torch._ops.OpOverload | None:
    """Return the operator of that name, as in `aten::add.Tensor`; None where torch has no such schema."""
    space, _, short = name.partition("::")
    packet, _, overload = short.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    device = source.device if device is None else device
    target = torch.empty_like(
        source,
        dtype=source.dtype if dtype is None else dtype,
        device=device,
        # Pinned as torch does it, so that the host need not wait.
        pin_memory=device.type == "cpu" and non_blocking,
        memory_format=torch.preserve_format if memory_format is None else memory_format,
    )
    return target.copy_(source, non_blocking)


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.clone(memory_format=memory_format)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, *args, **kwargs)[0]
    return output
