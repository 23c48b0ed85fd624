"""Start the processes that a benchmark needs, pools of workers and servers, and end them with it.

A server of this project says on stderr where it listens. Its output goes to a file, whose last lines say why
a server ended that should not have.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType

from recipes.schema.recipe import ROOT

EVERY_S = 0.1  # seconds between two checks of a starting server
START_S = 300.0  # seconds in which a server starts, unless the caller says otherwise
END_S = 30.0  # seconds for a server to end, beyond the time that it gives to requests
FAREWELLS = ("Shutting down", "Finished server process")  # lines that do not say why a server ended
LISTENS = r"listening at http://([\d.]+):(\d+)"
READY = r"ready after .*, process (\d+)"


@contextlib.contextmanager
def process_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh processes; an error or a signal ends them at once, not after their work."""
    spawn = multiprocessing.get_context("spawn")
    with leaving_at_signals(), ProcessPoolExecutor(num_processes, spawn) as pool:
        before = set(multiprocessing.active_children())
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


class ServerProcess:
    """A server in its own process, whose output goes to `log`; `url` is where it listens."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._name, self._log, self.url = name, log, ""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            # The server has its own session, so that ctrl-C reaches only this process, which then stops it.
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def check(self) -> None:
        """Raise ValueError if it has ended."""
        if (status := self._process.poll()) is not None:
            raise self._trouble(f"ended with status {status}")

    def wait(self, timeout_s: float, *, ready: str, listens: str = LISTENS) -> None:
        """Wait until it says where it listens and, if it has a path `ready`, until that answers 200.

        Raises ValueError if it ends before, or takes too long.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            found = re.search(listens, self._log.read_text(encoding="utf-8", errors="replace"))
            if found and (not ready or _is_ready(found[1], int(found[2]), ready)):
                self.url = f"http://{found[1]}:{found[2]}"
                return
            self.check()
            if time.monotonic() > until_s:
                raise self._trouble(f"takes no requests after {timeout_s:g} s")
            time.sleep(EVERY_S)

    def end(self, end_s: float) -> None:
        """Send SIGTERM and wait; kill the server, with a message on stderr, if that takes too long.

        Processes that it started in its session are killed then too: not every server's end with it.
        """
        self._process.terminate()
        try:
            self._process.wait(end_s)
        except subprocess.TimeoutExpired:
            print(self._trouble("does not end, and is killed"), file=sys.stderr)
        finally:  # also where the wait is interrupted
            kill_session(self._process)

    def said(self, pattern: str) -> list[str]:
        """Return what a pattern's group has matched in its log so far."""
        return re.findall(pattern, self._log.read_text(encoding="utf-8", errors="replace"))

    def cpu_s(self) -> float:
        """Return the processor time of all its threads so far, by Linux's scheduler, in nanosecond steps."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def resident_kib(self) -> tuple[int, int]:
        """Return the memory that it holds, and that its engine does, which is its latest process."""
        processes = self._process.pid, self.said(READY)[-1]
        statuses = [Path(f"/proc/{each}/status").read_text() for each in processes]
        server_kib, engine_kib = (int(each.partition("VmRSS:")[2].split()[0]) for each in statuses)
        return server_kib, engine_kib

    def _trouble(self, what: str) -> ValueError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip() and not line.startswith(FAREWELLS)]
        last = "; ".join(said[-2:]) or "nothing"  # usually why an engine ended, and that it did
        return ValueError(f"{self._name}: the server {what}; it last said: {last} ({self._log})")


@contextlib.contextmanager
def serving(
    name: str,
    command: Sequence[str],
    log: Path,
    timeout_s: float = START_S,
    end_s: float = END_S,
    *,
    ready: str = "/ready",
    listens: str = LISTENS,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """Start a server that people would start so, and yield it once it is ready; it ends with the context.

    `listens` finds in its log the address and the port at which it listens.

    No key is asked for, and a signal that ends this process ends the server too.
    """
    given = {key: value for key, value in os.environ.items() if key != "API_KEY"} | dict(environment)
    with leaving_at_signals():
        server = ServerProcess(name, command, log, given)
        try:
            server.wait(timeout_s, ready=ready, listens=listens)
            yield server
        finally:
            server.end(end_s)


@contextlib.contextmanager
def started(*command: str, ready: str = "/ready") -> Iterator[ServerProcess]:
    """Start a module as a server with one thread for its tensors, and yield it once it is ready."""
    whole, one_thread = [sys.executable, "-m", *command], {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="server-") as folder:
        log = Path(folder) / "server.log"
        with serving(command[0], whole, log, ready=ready, environment=one_thread) as server:
            yield server


@contextlib.contextmanager
def leaving_at_signals() -> Iterator[None]:
    """Have signals that end this process do so by way of `finally`, so that it can end others first.

    One that is ignored stays so, as that of a closed terminal under nohup.
    """
    heeded = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = {each: signal.signal(each, _leave) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with a session of its own, and all others in it."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_ready(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # the server listens before it answers
    finally:
        connection.close()
