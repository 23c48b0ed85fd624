"""Use what only torch_npu has for a step on an NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch_npu


def profile_into(folder: Path) -> Any:
    """Return a profiler of host and NPU, not yet started, that writes its tables and trace into a folder."""
    profiler = torch_npu.profiler
    return profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
    )
