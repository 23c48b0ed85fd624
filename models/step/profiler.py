"""Record what the host and the device do in a number of steps, as a trace that Perfetto or MindStudio opens.

On a CPU and on CUDA this is torch's profiler, on an NPU that of torch_npu, whose folder has the launches and
times of each operator as tables, too.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

Kind = Literal["cpu", "cuda", "npu"]


class StepProfiler:
    """Writes a trace of some steps below `folder`; one at a time, all calls in the thread that steps."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder, self._kind = folder, kind
        self._recording: Any = None
        self._path = folder
        self._num_left = 0

    @property
    def is_on(self) -> bool:
        """Whether a trace is being recorded."""
        return self._recording is not None

    def begin(self, num_steps: int) -> None:
        """Record the next so many steps.

        Raises OSError if the folder cannot be written, and ValueError if the profiler cannot record.
        """
        assert not self.is_on, "one trace at a time"
        self._folder.mkdir(parents=True, exist_ok=True)
        began = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        self._path, self._num_left = self._folder / f"steps-{began}", num_steps
        if self._kind == "npu":
            from models.step.npu import profile_into

            recording = profile_into(self._path)
        else:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._kind == "cuda" else []
            recording = profile(activities=activities)
        with _failures():
            recording.start()
        self._recording = recording

    def stepped(self) -> bool:
        """Count a step; return whether it was the last of the trace, which is then to be ended."""
        self._num_left -= 1
        return not self._num_left

    def end(self) -> Path:
        """Write the trace of the steps so far and return its file, or its folder.

        Raises OSError or ValueError if it cannot be written.
        """
        recording, self._recording = self._recording, None
        if self._kind == "cuda":
            torch.cuda.synchronize()  # the launches of the last step are still being computed
        with _failures():
            recording.stop()  # this writes the folder on an NPU
            if self._kind == "npu":
                return self._path
            path = self._path.with_suffix(".json")
            recording.export_chrome_trace(str(path))
        if not path.is_file():  # torch only logs that it could not write
            Path(f"{path}.tmp").unlink(missing_ok=True)
            raise OSError(
                f"the trace {path} cannot be written; free some space, or see that its folder is there"
            )
        return path


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Name the profiler as what failed; a trace that cannot be had must not end the engine."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"the profiler failed: {error}") from error
