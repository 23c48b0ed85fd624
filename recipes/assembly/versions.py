"""Describe the machine and the versions with which a figure was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from devices.host_limits import visible_cores

PACKAGES = ("numpy", "torch", "torch_npu", "triton", "transformers")


def describe(device: str | None = None) -> dict[str, str | int]:
    """Return the machine and the versions that matter; `device` is the name of the device that computes."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = models[0] if models else cpu
    preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    return {
        **({} if device is None else {"device": device}),
        "cpu": cpu,
        "cores": visible_cores(),
        "python": platform.python_version(),
        **installed(),
        "preloaded": " ".join(preloaded) or "nothing",
    }


def installed() -> dict[str, str]:
    """Return the versions of those PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
