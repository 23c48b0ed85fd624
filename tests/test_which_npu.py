"""Tests for an NPU run on the real one where there is one, and otherwise on the stand-in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests import device_kinds
from tests.attention.test_attention import shape

has_module = importlib.util.find_spec


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What the tests run on, where torch_npu lies beside torch or beside the stand-in, and finds an NPU."""

    def choose(*, beside_torch: bool, finds: bool | None, has_stand_in: bool, started: bool = False) -> Any:
        def find_spec(name: str) -> Any:
            return beside_torch or None if name == "torch_npu" else has_module(name)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(device_kinds, "STAND_IN", tmp_path if has_stand_in else tmp_path / "nothing")
        monkeypatch.setitem(sys.modules, "virtual_npu.device", SimpleNamespace(_started=["it"] * started))
        # None is how a module that cannot be imported stands there: as torch_npu without CANN
        module = None if finds is None else ModuleType("torch_npu")
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: bool(finds)), raising=False)
        chosen = device_kinds.npu.__wrapped__()
        monkeypatch.setattr(device_kinds, "npu", lambda: chosen)
        return chosen

    return choose


def test_a_real_npu_is_used_where_torch_npu_finds_one(found: Any) -> None:
    assert found(beside_torch=True, finds=True, has_stand_in=True) == "real"
    assert not device_kinds.section("npu").virtual
    assert device_kinds.settings("npu") == ["device.kind=npu", "model.dtype=bfloat16"]
    with pytest.raises(pytest.skip.Exception, match="no float32"):
        device_kinds.operators("npu", "fused", shape())


@pytest.mark.parametrize(
    "here",
    [
        {"beside_torch": False, "finds": None, "has_stand_in": True},
        {"beside_torch": True, "finds": None, "has_stand_in": False},
        {"beside_torch": True, "finds": False, "has_stand_in": False},
        {"beside_torch": True, "finds": True, "has_stand_in": True, "started": True},
    ],
    ids=["beside the stand-in", "no CANN", "no device", "a stand-in that has started"],
)
def test_else_the_stand_in_is(found: Any, here: dict[str, Any]) -> None:
    assert found(**here) == "virtual"
    assert device_kinds.section("npu").virtual
    fp32 = ["device.kind=npu", "device.virtual=true", "device.virtual_fp32=true"]
    assert device_kinds.settings("npu") == [*fp32, f"device.virtual_release={device_kinds.OLDER}"]


def test_and_without_torch_npu_neither(found: Any) -> None:
    assert found(beside_torch=False, finds=None, has_stand_in=False) is None
    assert not device_kinds.has_npu()
