"""The devices on which the tests run: the CPU, and an NPU and CUDA where they are present.

Operators come from where recipes get them. The NPU is a real one where there is one; otherwise it is the
stand-in, which takes float32 here, as no real one does.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from attention.reference import Attention
from devices.shapes import AttentionShape
from models.ops.reference import Ops
from recipes.machine import Machine, start
from recipes.schema.recipe import DeviceSection

Kind = Literal["cpu", "npu", "cuda"]
Way = Literal["reference", "fused"]

OLDER = "2.10.0.post4"  # whose schemas every call has to fit, though the tests run a newer torch_npu
STAND_IN = Path(sys.prefix, "virtual_npu", "torch_npu")  # where `scripts/setup.sh npu` puts torch_npu for it


@cache
def npu() -> Literal["real", "virtual"] | None:
    """The NPU of these tests, if there is any: torch_npu lies beside torch where CANN is, and finds one."""
    stand_in = sys.modules.get("virtual_npu.device")
    if stand_in is not None and stand_in._started:
        return "virtual"
    is_beside_torch = importlib.util.find_spec("torch_npu") is not None
    if is_beside_torch and finds_npu():
        return "real"
    return "virtual" if is_beside_torch or STAND_IN.is_dir() else None


def finds_npu() -> bool:
    """Whether torch_npu can be imported as it is, with the CANN of this machine, and has a device."""
    try:
        import torch_npu  # noqa: F401 - it gives torch its npu
    except (ImportError, OSError):  # there is no CANN
        return False
    return bool(vars(torch)["npu"].is_available())  # which torch does not declare


def has_npu() -> bool:
    """Whether there is an NPU, at least in this machine's memory."""
    return npu() is not None


stand_in_alone = pytest.mark.skipif(npu() != "virtual", reason="it is about the stand-in, which is not here")


def own(kind: Kind) -> dict[str, Any]:
    """What a recipe's device says in tests, beside its kind."""
    if kind == "npu":
        return {"virtual": True, "virtual_fp32": True, "virtual_release": OLDER} if npu() == "virtual" else {}
    return {"threads": 1, "compile": False} if kind == "cpu" else {}


def section(kind: Kind, attention: Way = "fused", **more: Any) -> DeviceSection:
    """The device of a recipe for tests."""
    return DeviceSection(kind=kind, attention=attention, **own(kind) | more)


def settings(kind: Kind) -> list[str]:
    """The same as overrides of a recipe, whose model a real NPU has in bfloat16."""
    return [
        f"device.kind={kind}",
        *(f"device.{key}={str(value).lower()}" for key, value in own(kind).items()),
        *(["model.dtype=bfloat16"] if kind == "npu" and npu() == "real" else []),
    ]


def machine(kind: Kind, attention: Way = "fused") -> Machine:
    """The machine, started."""
    return start(section(kind, attention))


def operators(kind: Kind, attention: Way, shape: AttentionShape) -> tuple[Ops, Attention]:
    """What a recipe would compute with; skips the test where that takes no float32."""
    if (kind, attention, npu()) == ("npu", "fused", "real") and shape.dtype == torch.float32:
        pytest.skip("fused attention of a real NPU takes no float32")
    return machine(kind, attention).operators(shape)


def on_each(*ways: Way) -> list[Any]:
    """Parameters (kind, way) of a test: each way on each device. Plain torch is slow on the virtual NPU."""
    marks = {
        "cpu": [],
        "npu": [pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")],
        "cuda": [
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    }
    slow = {("npu", "reference"): [pytest.mark.slow]}
    return [
        pytest.param((kind, way), id=f"{kind}-{way}", marks=marks[kind] + slow.get((kind, way), []))
        for kind in marks
        for way in ways
    ]
