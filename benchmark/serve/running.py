"""Start this project's servers for a benchmark, and read what they take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipes.schema.recipe import ROOT

STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that listens."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the processor time of all its threads so far, by Linux's scheduler, in nanosecond steps."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def resident_kib(self) -> int:
        """Return the memory that it holds."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])


@contextmanager
def started(*command: str) -> Iterator[Running]:
    """Start a server of this project, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    # Reads on, so that a full pipe never blocks the server.
    said, reader = [], threading.Thread(target=process.stderr.read)
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"listening at (http://\S+?),", line):
                break
        else:
            raise OSError(f"{' '.join(command)} has ended: {''.join(said[-3:]).strip()}")
        reader.start()
        yield Running(found[1], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()
