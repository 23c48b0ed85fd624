"""Traces of steps are written where they were asked for, by the profiler of the device."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from models.step.profiler import StepProfiler


def test_a_trace_holds_the_operators_of_its_steps_alone(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "traces", "cpu")
    torch.zeros(3).sin()
    profiler.begin(2)
    for is_last in (False, True):
        torch.zeros(3).cos()
        assert profiler.stepped() == is_last
    written = profiler.end()
    torch.zeros(3).tan()
    names = [each.get("name") for each in json.loads(written.read_text())["traceEvents"]]
    assert [names.count(f"aten::{name}") for name in ("sin", "cos", "tan")] == [0, 2, 0]
    assert not profiler.is_on


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        StepProfiler(tmp_path / "file" / "traces", "cpu").begin(1)


def test_a_trace_without_room_is_not_told_as_written(tmp_path: Path) -> None:
    profiler, limits = StepProfiler(tmp_path, "cpu"), resource.getrlimit(resource.RLIMIT_FSIZE)
    profiler.begin(1)
    for _ in range(500):
        torch.zeros(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"the trace .*steps-.*\.json cannot be written; free some space"):
            profiler.end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not profiler.is_on
    assert not list(tmp_path.iterdir())


def test_an_npu_is_recorded_by_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    class Recording:
        def __init__(self, **options: object) -> None:
            asked.update(options)

        def start(self) -> None:
            if asked.get("started"):
                raise RuntimeError("CANN's profiler is not there")
            asked["started"] = True

        def stop(self) -> None:
            asked["stopped"] = True

    module = ModuleType("torch_npu")
    module.profiler = SimpleNamespace(
        profile=Recording,
        ProfilerActivity=SimpleNamespace(CPU="cpu", NPU="npu"),
        tensorboard_trace_handler=lambda folder: f"into {folder}",
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.delitem(sys.modules, "models.step.npu", raising=False)
    profiler = StepProfiler(tmp_path, "npu")
    profiler.begin(1)
    path = profiler.end()
    with pytest.raises(ValueError, match="the profiler failed: CANN's profiler is not there"):
        profiler.begin(1)
    assert not profiler.is_on
    asked["on_trace_ready"] = str(asked["on_trace_ready"]).partition("steps-")[0]
    sys.modules.pop("models.step.npu")  # it has the module above
    assert path.parent == tmp_path
    assert asked == {
        "activities": ["cpu", "npu"],
        "on_trace_ready": f"into {tmp_path}/",
        "started": True,
        "stopped": True,
    }
