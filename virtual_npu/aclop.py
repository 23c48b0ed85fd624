"""Refuse the operators of torch that torch_npu sends through aclop where a device refuses them.

Most operators of torch have two implementations in torch_npu: one of precompiled kernels, aclnn, and an older
one, aclop, which compiles on the host when it is called. The older one runs where online compilation is on,
which is the default of products before the 910B, and where an argument has the tiled format (FRACTAL_NZ),
which only matrix products accept. A capture refuses aclop. Two kinds of calls are refused outside a capture
as well, where an argument is tiled: a product with a sum before the 910B, and an operator that reads an index
on the host, element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from virtual_npu.contract import Breach, ContractError, Rule, shape

FRACTAL_NZ = 29
ASCEND_910B1 = 220  # torch_npu's number of the first product that does not compile online
PRODUCTS_OF_TILES = {"matmul", "mm", "bmm", "addmm"}
BY_INDEX = {"index_fill_", "index_fill", "index_copy_", "index_copy", "index_select", "index_put_"}

CAPTURE = "torch_npu core/npu/NPUGraphsUtils.h: assertNotCapturingAclop"


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an operator of torch: its bare name, and its tensors on the device."""

    name: str
    tensors: Sequence[Tensor]

    @property
    def is_captured(self) -> bool:
        return bool(torch.get_device_module("npu").is_current_stream_capturing())

    def in_tiles(self) -> Iterator[Tensor]:
        """Return the arguments that have the tiled format."""
        yield from (each for each in self.tensors if is_tiled(each))


def is_tiled(tensor: Tensor) -> bool:
    """Return whether a tensor of the device has the tiled format."""
    import torch_npu  # imported here because the import loads CANN

    return int(torch_npu.get_npu_format(tensor)) == FRACTAL_NZ


@cache
def is_before_910b() -> bool:
    """Return whether this process's product is the 310P or the first 910."""
    return int(torch.get_device_module("npu").utils.get_soc_version()) < ASCEND_910B1


def check(name: str, tensors: Sequence[Tensor]) -> None:
    """Check a call of an operator of torch, such as `aten::mm`. Raises ContractError."""
    call = AtenCall(name.partition("::")[2].partition(".")[0], tensors)
    for rule in RULES:
        for breach in rule.check(call):
            raise ContractError(call.name, breach, rule)


def _online(call: AtenCall) -> Iterator[Breach]:
    npu = torch.get_device_module("npu")
    if is_before_910b() and not npu.is_jit_compile_false() and call.is_captured:
        yield "the compile mode", "online, while a stream is captured"


def _sum(call: AtenCall) -> Iterator[Breach]:
    if call.name == "addmm" and is_before_910b():
        yield from (("mat2", f"in tiles, {shape(each)}") for each in call.in_tiles())


def _by_index(call: AtenCall) -> Iterator[Breach]:
    if call.name in BY_INDEX:
        yield from (("self", f"in tiles, {shape(each)}") for each in call.in_tiles())


def _captured(call: AtenCall) -> Iterator[Breach]:
    if call.name not in PRODUCTS_OF_TILES and call.is_captured:
        yield from (("an argument", f"in tiles, {shape(each)}, while captured") for each in call.in_tiles())


RULES = (
    Rule(
        "online-compile",
        "an operator that is compiled when it is called cannot be captured, as none is before the 910B unless"
        " jit_compile is off",
        "torch_npu framework/interface/EnvVariables.cpp: CheckJitDisableInner; " + CAPTURE,
        "call torch.npu.set_compile_mode(jit_compile=False) first",
        _online,
    ),
    Rule(
        "sum-of-tiles",
        "before the 910B a product with a sum takes no tiles, and goes to aclop",
        "op-plugin opapi/AddmmKernelNpuOpApi.cpp; CANN aclnnAddmmWeightNz: products",
        "multiply, then add",
        _sum,
    ),
    Rule(
        "tiles-by-index",
        "an index into tiles is read on the host, and all of the tensor is converted",
        "op-plugin aclops/IndexFillKernelNpu.cpp and IndexCopyKernelNpu.cpp; vllm-ascend"
        " _310p/kv_block_zeroer.py: slices alone",
        "use slices",
        _by_index,
    ),
    Rule(
        "captured-tiles",
        "in a capture, only matrix products take tiles",
        "torch_npu 2.13, of whose operators of torch only these do not ask for the format; " + CAPTURE,
        "keep it in rows, or do this outside the capture",
        _captured,
    ),
)
