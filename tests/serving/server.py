"""A server of our own, in a process of its own, at a port of its own."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import httpx

from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S
from tests.serving import warm

TINY = "recipes/tiny/cpu.yaml"

# How long a test waits for what must come. It is an end and no claim: a slow machine whose cores others use
# takes minutes where another takes seconds.


class Server:
    """`scripts.serve` on the tiny model, until it is closed; `log` is what it has said.

    It is a fork of a process that has done the imports (see `warm`), unless it is to be fresh. It has no
    spare engine and waits long for a step of a busy machine, unless its arguments say otherwise.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        limits: dict[int, int] | None = None,  # limits of the system, by resource.RLIMIT_...
        port: int = 0,
        verb: str = "scripts.serve",  # or another that listens, which knows no recipe's keys then
    ) -> None:
        options = [*(arguments or (TINY,))]
        for key, value in (("server.spare_engine", "false"), ("server.step_timeout_s", f"{PATIENCE_S:g}")):
            if verb == "scripts.serve" and not any(each.startswith(f"{key}=") for each in options):
                options.insert(1, f"{key}={value}")

        def set_limits() -> None:
            for name, most in (limits or {}).items():
                resource.setrlimit(name, (most, most))

        command = [verb, *options, "--port", str(port)]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        self.process: subprocess.Popen[str] | warm.Process
        if not warm.is_possible():
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=variables,
                preexec_fn=set_limits,
                stderr=subprocess.PIPE,
                text=True,
            )
        else:
            self.process = warm.start(command[0], command[1:], variables, limits or {})
        # A test that fails before it closes the server leaves none behind that loads the machine
        weakref.finalize(self, self.process.kill)
        self.log: list[str] = []
        self._said = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.url = self.wait_for(r"listening at (\S+),")[1]
        except AssertionError:
            self.process.kill()
            raise

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.log.append(line.rstrip())
                self._said.notify_all()

    def wait_for(self, pattern: str, since: int = 0) -> re.Match[str]:
        """The first line of the log, from `since` on, that has it."""
        until_s = time.monotonic() + PATIENCE_S
        with self._said:
            while True:
                says_more = self._listener.is_alive() and time.monotonic() < until_s
                found = [match for line in self.log[since:] if (match := re.search(pattern, line))]
                if found:
                    return found[0]
                assert says_more, f"no {pattern!r} in\n" + "\n".join(self.log[-60:])
                self._said.wait(0.1)

    def ready(self) -> Server:
        """Once it takes requests."""
        try:
            self.wait_for(r"ready .*process \d+")  # its first engine is ready
            self.wait_until("/ready", 200)
        except (AssertionError, httpx.HTTPError):
            self.process.kill()
            raise
        return self

    def wait_until(self, path: str, status: int) -> None:
        """Until a path answers so."""
        until_s = time.monotonic() + PATIENCE_S
        with httpx.Client(timeout=PATIENCE_S) as client:  # a new one for each question takes longer than both
            while client.get(self.url + path).status_code != status:
                assert time.monotonic() < until_s, f"{path} never gave {status}: {self.log[-5:]}"
                time.sleep(0.05)

    @property
    def port(self) -> int:
        """At which it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """Of the process of its last engine that was ready."""
        said = r"ready .*process (\d+)"
        self.wait_for(said)  # it may be ready before its line has come
        return int([match for line in self.log if (match := re.search(said, line))][-1][1])

    def close(self) -> int:
        """End it, and its exit status."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Until it has ended by itself; its exit status."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._listener.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


def defects(server: Server, since: int) -> list[str]:
    """The lines of its log, from `since` on, that tell of a fault of its own."""
    signs = ("Traceback", "a defect", "ended by")
    return [line for line in server.log[since:] if any(each in line for each in signs)]


def started(arguments: Sequence[str] = (TINY,)) -> Server:
    """A server that takes requests."""
    return Server(*arguments).ready()
