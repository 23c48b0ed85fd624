"""Compute an operator on tensors of npu:0 by a CPU function over the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from virtual_npu import aclop

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


class Memory:
    """All of the device's addresses as one CPU tensor for each dtype, from which views are cut.

    The storage of such a view is not the tensor's own: it does not keep the tensor alive, and it may not be
    resized.
    """

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base, self.stop = base, base + num_bytes
        everything = (ctypes.c_char * num_bytes).from_address(base)
        raw = torch.frombuffer(everything, dtype=torch.uint8)
        self.all = {dtype: raw.view(dtype) for dtype in DTYPES}

    def holds(self, view: Tensor) -> bool:
        """Return whether a CPU tensor is a view of the device's memory."""
        return self.base <= view.data_ptr() < self.stop

    def view(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor of the same bytes, shape and strides."""
        address = tensor.data_ptr()
        if address == 0:  # a tensor without elements has no address
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        assert self.base <= address < self.stop, f"{address:#x} is no address of the virtual NPU"
        place = (address - self.base) // tensor.element_size()
        return self.all[tensor.dtype].as_strided(tensor.shape, tensor.stride(), place)


# Operators of torch that accept a tensor of the host beside one of the device.
MIXED = {
    "copy_",
    "_copy_from",
    "_copy_from_and_resize",
    "index",
    "index_put_",
    "_index_put_impl_",
    "index_put",
    "_foreach_copy_",
}
CPU = torch.device("cpu")
FORMAT_CAST = "npu::npu_format_cast"
NEEDS_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Originals = dict[
    int, tuple[Tensor, Tensor]
]  # id of a view -> the view, held so that its id is not reused, and the tensor that it views


class HostCall:
    """One operator, computed on the CPU.

    `function` takes the operator's arguments as CPU tensors; `captured`, if given, is called with them when a
    graph captures the operator, before their values exist.
    """

    def __init__(
        self,
        operator: torch._ops.OpOverload,
        function: Callable[..., Any],
        memory: Memory,
        captured: Callable[..., Any] | None = None,
    ) -> None:
        self.operator, self.function, self.memory, self.captured = operator, function, memory, captured
        schema = operator._schema
        space, _, short = schema.name.partition("::")
        self.name = operator.name()
        self.is_aten = space == "aten"
        self.mixed = space != "aten" or short in MIXED
        # torch resizes an output that does not fit; operators of torch_npu write into it as it is.
        self.resized = {each.name for each in schema.arguments if each.is_out} if space == "aten" else set()
        self._needs_host = bool(NEEDS_HOST & set(operator.tags))
        self._indexes = self.name == "aten::index.Tensor"
        # What the meta kernel made of arguments of a kind, see `deferred_calls`; None: these arguments
        self.made: dict[Any, Any] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals: Originals = {}
        on_host, named = self.to_host(args, kwargs, originals)
        result = self.perform(on_host, named, originals)
        if self.name == FORMAT_CAST:
            return self._in_format(result, int(args[1]))
        if not self.num_returns:
            return None
        return result if kwargs.get("device") == CPU else self.to_device(result, originals)

    def needs_host(self, args: tuple[Any, ...]) -> bool:
        """Return whether the result, or its shape, depends on values that the host must read."""
        if self._indexes:  # the shape of an integer index suffices; that of a mask depends on its values
            return any(each.dtype in (torch.bool, torch.uint8) for each in tensors(args[1]))
        return self._needs_host

    def perform(self, on_host: list[Any], named: dict[str, Any], originals: Originals) -> Any:
        """Run `function`, and resize the views given to torch's `out=` where the result's shape differs."""
        if not self.resized:
            return self.function(*on_host, **named)
        given = {name: each for name, each in named.items() if name in self.resized}
        outs = list(tensors(list(given.values())))
        fresh = {id(each): torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in outs}
        self.function(*on_host, **named | swapped(given, fresh))
        for view in outs:
            out, result = originals[id(view)][1], fresh[id(view)]
            if out.shape != result.shape:
                out.resize_(result.shape)
            self.on_host(out).copy_(result)
        return outs[0] if self.num_returns == 1 else tuple(outs)

    def to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], originals: Originals
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as CPU tensors; fills `originals`, which maps each view to its tensor.

        Raises RuntimeError, as torch does, where a tensor of the host is among them.
        """

        on_host = [self._host(each, originals) for each in args]
        named = {name: self._host(each, originals) for name, each in kwargs.items() if name != "pin_memory"}
        if not self.mixed and self.of_host(originals):
            raise RuntimeError(
                f"{self.name}: Expected all tensors to be on the same device, but found at least "
                "two devices, npu:0 and cpu!"
            )
        if self.is_aten:
            aclop.check(self.name, [each for _, each in originals.values() if not each.is_cpu])
        return on_host, named

    def _host(self, value: Any, originals: Originals) -> Any:
        if isinstance(value, Tensor):
            view = value if value.is_cpu else self.memory.view(value)
            originals[id(view)] = (view, value)
            return view
        if isinstance(value, (list, tuple)):
            return [self._host(each, originals) for each in value]
        return CPU if isinstance(value, torch.device) else value

    def of_host(self, originals: Originals) -> bool:
        """Return whether a tensor of the host is among the arguments; scalars do not count."""
        return any(view is each and each.dim() for view, each in originals.values())

    def returned(self, on_host: list[Any], named: dict[str, Any]) -> Any:
        """Return the arguments that the operator returns; None where it makes new tensors."""
        if "out" in named or self.resized:  # the schema of torch_npu's `Tensor[] out` states no alias
            outs = [each for name, each in named.items() if name == "out" or name in self.resized]
            return next(tensors(outs)) if self.num_returns == 1 else tuple(tensors(outs))
        if self._returned_names is None:
            return None
        by_name = dict(zip(self._argument_names, on_host)) | named
        found = tuple(by_name[name] for name in self._returned_names)
        return found[0] if len(found) == 1 else found

    # torch reads a schema anew whenever it is asked for: once for each operator that is called

    @cached_property
    def num_returns(self) -> int:
        """The number of results of the operator."""
        return len(self.operator._schema.returns)

    @cached_property
    def _argument_names(self) -> list[str]:
        return [each.name for each in self.operator._schema.arguments]

    @cached_property
    def _returned_names(self) -> list[str] | None:
        """The arguments that are returned, in order; None where a result is new."""
        schema = self.operator._schema
        aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]
        if len(aliases) < len(schema.returns):
            return None
        by_alias = {
            frozenset(each.alias_info.before_set): each.name
            for each in schema.arguments
            if each.alias_info is not None
        }
        return [by_alias[frozenset(alias.before_set)] for alias in aliases]

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or a CPU view of its bytes where it is on npu:0."""
        return tensor if tensor.is_cpu else self.memory.view(tensor)

    def _in_format(self, result: Tensor, acl_format: int) -> Tensor:
        """Return a copy on the device whose description names the format; its bytes stay in rows."""
        import torch_npu  # imported here because the import loads CANN

        new: Tensor = torch_npu.empty_with_format(
            result.shape, dtype=result.dtype, device="npu:0", acl_format=acl_format
        )
        self.memory.view(new).copy_(result)
        return new

    def to_device(self, result: Any, originals: Originals) -> Any:
        """Return a result with its tensors on npu:0; a returned argument is the caller's own tensor."""
        if isinstance(result, Tensor):
            if id(result) in originals:
                return originals[id(result)][1]
            new = torch.empty_like(result, device="npu:0")
            if not result.is_meta:
                self.memory.view(new).copy_(result)
            return new
        if isinstance(result, list):
            return [self.to_device(each, originals) for each in result]
        if isinstance(result, tuple):  # torch unpacks a named or plain tuple by position
            return tuple(self.to_device(each, originals) for each in result)
        return result


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def swapped(value: Any, tensors_by_id: dict[int, Tensor]) -> Any:
    """Return nested arguments with some of their tensors replaced."""
    if isinstance(value, Tensor):
        return tensors_by_id.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(swapped(each, tensors_by_id) for each in value)
    if isinstance(value, dict):
        return {name: swapped(each, tensors_by_id) for name, each in value.items()}
    return value
