"""Define the settings of this project's server that a sweep tries, and start a server for each."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipes.schema.reader import load
from recipes.schema.recipe import ROOT

EVERY_S = 0.1  # seconds between two checks of a starting server
END_S = 30.0  # seconds for a server to end, beyond the time that it gives to requests
MOST_NAME = 120  # characters of a folder's name
FAREWELLS = ("Shutting down", "Finished server process")  # lines that do not say why a server ended
LISTENS = re.compile(r"listening at http://([\d.]+):(\d+)")


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """A recipe with overrides; `tried` are the overrides in which a sweep's settings differ."""

    recipe: str
    overrides: tuple[str, ...]
    tried: tuple[str, ...]
    sha256: str  # digest of the recipe as it was read
    drain_s: float

    @property
    def name(self) -> str:
        """The tried overrides as the name of a folder; a shortened name gets a digest, to stay unique."""
        text = ",".join(self.tried)
        safe = re.sub(r"[^\w.,=+-]", "_", text)[:MOST_NAME]
        return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def identity(self) -> dict[str, object]:
        """Return the fields that a result of this setting must have."""
        return {"recipe": self.recipe, "overrides": list(self.overrides), "recipe_sha256": self.sha256}


def values(text: str) -> list[str]:
    """Parse the overrides of one `--try KEY=V1,V2`."""
    name, equals, given = text.partition("=")
    found = [f"{name}={each.strip()}" for each in given.split(",")]
    if not equals or f"{name}=" in found:
        raise argparse.ArgumentTypeError(f"{text!r} names no values; write KEY=V1,V2 (null for none)")
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice; leave one out")
    return found


def product(recipe: str, overrides: Sequence[str], tries: Sequence[Sequence[str]]) -> list[SweepSetting]:
    """Return every setting, in the order given; raises ValueError for one that the recipe cannot have."""
    names = [each[0].partition("=")[0] for each in tries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--try {min(twice)} is given twice; part its values by commas")
    settings = []
    for tried in itertools.product(*tries):
        read = load(recipe, [*overrides, *tried])
        described = json.dumps(read.described(), sort_keys=True, default=str)
        digest = hashlib.sha256(described.encode()).hexdigest()
        settings.append(SweepSetting(recipe, (*overrides, *tried), tried, digest, read.server.drain_s))
    return settings


def command(setting: SweepSetting) -> list[str]:
    """Return the command that serves a setting at a free port of this machine; the server logs the port."""
    serve = [sys.executable, "-m", "scripts.serve", str(Path(setting.recipe).resolve())]
    return [*serve, *setting.overrides, "--host", "127.0.0.1", "--port", "0"]


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """A server that someone else started, and will stop."""

    url: str

    def check(self) -> None:
        """Check nothing: requests report the failures of a server that this sweep did not start."""


class StartedServer:
    """A server that this sweep started, in its own process; its output goes to `log`."""

    def __init__(self, setting: SweepSetting, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "API_KEY"}
        self._setting, self._log, self.url = setting, log, ""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command(setting),
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,  # ctrl-C reaches only this process, which then stops the server
            )

    def check(self) -> None:
        """Raise ValueError if it has ended."""
        if (status := self._process.poll()) is not None:
            raise self._trouble(f"ended with status {status}")

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it takes requests; raises ValueError if that takes longer than the timeout."""
        until_s = time.monotonic() + timeout_s
        while True:
            found = LISTENS.search(self._log.read_text(encoding="utf-8", errors="replace"))
            if found and _is_ready(found[1], int(found[2])):
                self.url = f"http://{found[1]}:{found[2]}"
                return
            self.check()
            if time.monotonic() > until_s:
                raise self._trouble(f"takes no requests after {timeout_s:g} s (--ready-check-timeout-sec)")
            time.sleep(EVERY_S)

    def end(self) -> None:
        """Send SIGTERM and wait; kill the server, with a message on stderr, if that takes too long."""
        self._process.terminate()
        try:
            self._process.wait(self._setting.drain_s + END_S)
        except subprocess.TimeoutExpired:
            print(self._trouble("does not end, and is killed"), file=sys.stderr)
        finally:  # also where the wait is interrupted
            self._process.kill()
            self._process.wait()

    def _trouble(self, what: str) -> ValueError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip() and not line.startswith(FAREWELLS)]
        last = "; ".join(said[-2:]) or "nothing"  # usually why an engine ended, and that it did
        return ValueError(f"{self._setting.name}: the server {what}; it last said: {last} ({self._log})")


@contextmanager
def started(setting: SweepSetting, log: Path, timeout_s: float) -> Iterator[StartedServer]:
    """Start a server of a setting at a free port, and yield it once it is ready; it ends with the context."""
    server = StartedServer(setting, log)
    before = {each: signal.signal(each, _leave) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        server.wait_until_ready(timeout_s)
        yield server
    finally:
        server.end()
        for each, handler in before.items():
            signal.signal(each, handler)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)  # exits by way of `finally`


def _is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # the server listens before it answers
    finally:
        connection.close()
