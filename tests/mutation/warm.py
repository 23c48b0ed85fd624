"""Run tests in forks of one process, which has imported what is costly and nothing of this project.

A line of standard input is a request in JSON: a limit in seconds and the arguments of pytest. A line of
standard output is the report on it. Each fork imports the project from the current directory as it is at that
time, and so do the processes that its tests start.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NoReturn

import pytest

# None of them starts a thread, which a fork would not have
COSTLY = ("torch", "numpy", "transformers", "hypothesis.strategies", "jsonschema", "msgspec", "tokenizers")


@dataclass(slots=True, eq=False)  # pytest puts its plugins into sets
class Report:
    """What became of the tests of one request."""

    failed: list[str] = field(default_factory=list)  # the tests that failed, in their order
    num_passed: int = 0
    problem: str = ""  # why there is no verdict, or empty

    def pytest_collectreport(self, report: Any) -> None:
        """Pytest calls this for each file that it has read."""
        if report.failed:
            last_line = str(report.longrepr).strip().splitlines()[-1]
            self.problem = f"{report.nodeid} cannot be read: {last_line}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest calls this for the set-up, the call and the end of each test."""
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.num_passed += report.when == "call" and report.passed


def main() -> None:
    """Answer one request after the other until standard input ends."""
    for name in COSTLY:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the exit runs the end of `forked`
    for line in sys.stdin:
        limit_s, arguments = json.loads(line)
        print(json.dumps(asdict(forked(limit_s, arguments))), flush=True)


def forked(limit_s: float, arguments: list[str]) -> Report:
    """Run pytest in a fork that leads a group of processes, and end the whole group afterwards."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            run_child(arguments, writer, output)
        os.close(writer)
        try:
            said = read_until(reader, time.monotonic() + limit_s)
        finally:
            os.close(reader)
            with contextlib.suppress(ProcessLookupError):  # it has not yet become the leader of its group
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if said is None:
            return Report(problem=f"no verdict within {limit_s:g} s")
        report = Report(**json.loads(said or "{}"))
        if not (report.failed or report.num_passed or report.problem):
            output.seek(0)
            tail = output.read()[-300:].decode(errors="replace").strip()
            report.problem = f"no test ran to its end: {tail}"
    return report


def run_child(arguments: list[str], writer: int, output: IO[bytes]) -> NoReturn:
    """Run the tests and write the report; the process ends here."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output.fileno()), (2, output.fileno())):
        os.dup2(target, stream)
    report = Report()
    try:
        pytest.main(arguments, plugins=[report])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, f"{json.dumps(asdict(report))}\n".encode())
        os._exit(0)


def read_until(reader: int, until_s: float) -> bytes | None:
    """Return the line that is written, what there is of it when its writer ends, or None if it is late."""
    said = b""
    while select.select([reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        said += part
        if not part or said.endswith(b"\n"):
            return said
    return None


if __name__ == "__main__":
    main()
