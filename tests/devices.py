"""On which devices do the tests run? The CPU, the virtual NPU and CUDA, each if it is here.

Operators come from where recipes get them. The virtual NPU takes float32 here, as no real one does.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from attention.reference import Attention, AttentionShape
from models.fused import Fused
from recipes.devices import Machine, start
from recipes.recipe import DeviceSection

Kind = Literal["cpu", "npu", "cuda"]
Way = Literal["reference", "fused"]

_OWN: dict[Kind, dict[str, Any]] = {
    "cpu": {"threads": 1},
    "npu": {"virtual": True, "virtual_fp32": True},
    "cuda": {},
}


@cache
def has_npu() -> bool:
    """Whether torch_npu is here, so that there is an NPU at least in this machine's memory."""
    beside = Path(sys.prefix, "virtual_npu", "torch_npu")  # where `scripts/setup.sh npu` puts it
    return beside.is_dir() or importlib.util.find_spec("torch_npu") is not None


def section(kind: Kind, attention: Way = "fused", **more: Any) -> DeviceSection:
    """The device of a recipe for tests."""
    return DeviceSection(kind=kind, attention=attention, **_OWN[kind] | more)


def settings(kind: Kind) -> list[str]:
    """The same as overrides of a recipe."""
    return [
        f"device.kind={kind}",
        *(f"device.{key}={str(value).lower()}" for key, value in _OWN[kind].items()),
    ]


def machine(kind: Kind, attention: Way = "fused") -> Machine:
    """The machine, started."""
    return start(section(kind, attention))


def operators(kind: Kind, attention: Way, shape: AttentionShape) -> tuple[Fused, Attention]:
    """What a recipe would compute with."""
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
