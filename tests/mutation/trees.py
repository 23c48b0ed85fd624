"""Judge faults in copies of the tree, each with a process that is warm to run its tests."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutation.fault import Fault
from tests.mutation.warm import Report

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(path.parent.name for path in sorted(ROOT.glob("*/__init__.py")))
# Examples are those of any run, but are not made smaller; and no message of an assertion is needed
PYTEST = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=no_shrink", "--tb=line", "--assert=plain")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said of one tree."""

    killers: Sequence[str]  # the tests that failed
    problem: str  # why there is no verdict, or empty
    seconds: float


class WarmTree:
    """A copy of the tree and the process that runs tests in it; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.warm"],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> WarmTree:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def judge(self, fault: Fault, limit_s: float) -> Outcome:
        """Run the test that is to kill this fault while the tree has it."""
        path = self._folder / fault.file
        sound = path.read_bytes()
        try:
            fault.plant(self._folder)
            return self.run(["-x", fault.killed_by], limit_s)
        except ValueError as error:
            return Outcome((), str(error), 0.0)
        finally:
            path.write_bytes(sound)

    def run(self, tests: Sequence[str], limit_s: float) -> Outcome:
        """Run these tests in the tree as it stands."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        start_s = time.monotonic()
        base = self._folder.with_name(f"{self._folder.name}-files")
        print(
            json.dumps([limit_s, [*PYTEST, f"--basetemp={base}", *tests]]),
            file=self._process.stdin,
            flush=True,
        )
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the process that runs the tests in {self._folder} has ended")
        report = Report(**json.loads(line))
        return Outcome(report.failed, report.problem, time.monotonic() - start_s)


def outcomes(faults: Mapping[str, Fault], jobs: int, limit_s: float) -> Iterator[tuple[str | None, Outcome]]:
    """Yield what becomes of each fault in its test, and under None of the sound tree in all, as they end."""
    with TemporaryDirectory(prefix="mutants") as folder, ExitStack() as open_trees:
        idle: SimpleQueue[WarmTree] = SimpleQueue()
        for tree in copies(Path(folder), jobs):
            idle.put(open_trees.enter_context(WarmTree(tree)))

        def judge(fault: Fault | None) -> Outcome:
            tree = idle.get()
            try:
                return tree.judge(fault, limit_s) if fault else tree.run(every, limit_s * len(every))
            finally:
                idle.put(tree)

        every = sorted({fault.killed_by for fault in faults.values()})
        with ThreadPoolExecutor(jobs) as threads:
            of_sound = {threads.submit(judge, None): None}  # it takes longest, so that it begins first
            names = of_sound | {threads.submit(judge, fault): name for name, fault in faults.items()}
            yield from ((names[each], each.result()) for each in as_completed(names))


def copies(folder: Path, count: int) -> Iterator[Path]:
    """Copy what the tests need; Python compares what is compiled with its source by content, not by time."""
    first = folder / "0"
    for room in ROOMS:
        shutil.copytree(ROOT / room, first / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", first)
    compileall.compile_dir(str(first), quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    yield first
    for number in range(1, count):
        yield shutil.copytree(first, folder / str(number))
