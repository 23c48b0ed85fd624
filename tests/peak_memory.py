"""How far the memory of this process rises while a test runs, whatever has run in the process before."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def forget_peak() -> int:
    """Let the peak begin anew where the system allows it; the bytes held at the peak from here on."""
    with suppress(OSError):  # then a rise below an earlier test's peak is not seen
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most bytes that were held since the peak was forgotten."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
