"""Prometheus with the files of serving/deploy shows a busy server, and alerts on real faults.

    python -m pytest -s tests/serving/test_watched.py

`PageLeak`, `MemoryGrows`, `SlowReaders`, `LogLost` and `RequestsFail` are left to test_alerts.py: a healthy
server and a quick test do not bring them about.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.prometheus import DEPLOY, RANGE, Prometheus
from tests.serving.server import TINY, Server

KEY = "key-of-prometheus"
HEADERS = {"authorization": f"Bearer {KEY}"}
PANELS = [
    (panel["title"], target["legendFormat"], target["expr"])
    for panel in json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
    for target in panel.get("targets", ())
]
# What a busy server with few pages, and no host tier, need not do
MAY_BE_ZERO = {
    "pages out",
    "pages in",
    "pages moved",
    "restarts",
    "must stay 0",
    "of the used, shared",
    "free",
}
NUM_DESCRIPTORS = 200


class Load:
    """Clients that ask again as soon as they are answered; more than the pages hold."""

    def __init__(self, server: Server, number: int) -> None:
        self._url = f"{server.url}/v1/completions"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]

    def __enter__(self) -> None:
        for each in self._threads:
            each.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        body = {"prompt": "One day, " * 8, "max_tokens": 400, "ignore_eos": True}
        while not self._over.is_set():
            response = httpx.post(self._url, json=body, headers=HEADERS, timeout=PATIENCE_S)
            if response.status_code != 200:
                self._over.wait(0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(
        TINY,
        "cache.num_pages=64",
        "scheduler.num_slots=8",
        "server.max_requests=12",
        "server.step_timeout_s=60",
        "server.spare_engine=false",
        environment={"API_KEY": KEY},
        limits={resource.RLIMIT_NOFILE: NUM_DESCRIPTORS},
        is_fresh=True,  # all of its children are engines, which the test kills
    ).ready()
    yield server
    if server.process.poll() is None:
        server.close()


@pytest.fixture(scope="module")
def watched(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(server, tmp_path_factory.mktemp("prometheus"), KEY)
    prometheus.until(lambda: prometheus.ask('up{job="continuous-batching"} == 1'))
    yield prometheus
    prometheus.close()


@pytest.mark.slow
def test_every_panel_draws_a_busy_server(server: Server, watched: Prometheus) -> None:
    left = dict.fromkeys(PANELS, "not asked")

    def all_drawn() -> bool:
        """Whether each has had a point by now; beside those that have not stands why."""
        post(server, timeout_s=0.01)
        for panel in list(left):
            _, legend, expression = panel
            values = watched.ask(
                expression.replace("$__rate_interval", RANGE).replace("$model", ".*")
            ).values()
            if not values or any(math.isnan(value) for value in values):
                left[panel] = f"{list(values)}"
            elif not any(values) and legend not in MAY_BE_ZERO:
                left[panel] = "only zeros"
            else:
                del left[panel]
        return not left

    with Load(server, 8):
        assert post(server, max_tokens=-2) == 400
        watched.until(all_drawn, so_far=lambda: left)
    print(f"{len(PANELS)} expressions, none empty")


def post(server: Server, **body: object) -> int:
    asked = {"prompt": "One day, ", "max_tokens": 200, "ignore_eos": True} | body
    return httpx.post(
        f"{server.url}/v1/completions", json=asked, headers=HEADERS, timeout=PATIENCE_S
    ).status_code


def fired(watched: Prometheus, alert: str, cause: Callable[[], object] = lambda: None) -> None:
    """Bring it about until Prometheus says that it fires; what it says is then a sentence."""
    started_s = time.monotonic()

    def firing() -> dict[str, str] | None:
        cause()
        return watched.firing().get(alert)

    said = watched.until(firing, timeout_s=PATIENCE_S)
    assert "<" not in said["summary"], said
    print(f"{time.monotonic() - started_s:6.1f} s  {alert}: {said['summary']}")


@pytest.mark.slow
def test_faults_wake_somebody(server: Server, watched: Prometheus) -> None:
    quiet = {"ServerDown", "EngineDown", "EngineSilent", "EngineRestarts", "PageLeak", "KeysWrong", "LogLost"}
    assert not quiet & set(watched.firing())
    with Load(server, 16):
        for alert in ("PagesShort", "WorkLost", "RequestsRejected"):
            fired(watched, alert)
    fired(watched, "TimeoutsMany", lambda: post(server, timeout_s=0.01))
    wrong = {"authorization": "Bearer wrong"}
    fired(
        watched,
        "KeysWrong",
        lambda: [httpx.get(f"{server.url}/v1/models", headers=wrong, timeout=PATIENCE_S) for _ in range(20)],
    )
    idle = connections(server, int(0.85 * NUM_DESCRIPTORS))
    fired(watched, "DescriptorsShort")
    for each in idle:
        each.close()
    with Load(server, 12):  # four more than slots: some wait all the while that the engine is stopped
        watched.until(lambda: watched.ask("sum(cb_requests_queued) >= 4"))  # counts from there on
        os.kill(server.engine_pid, signal.SIGSTOP)
        try:
            fired(watched, "EngineSilent")
        finally:
            os.kill(server.engine_pid, signal.SIGCONT)
    for alert in ("QueueSlow", "FirstTokenSlow"):  # no load runs, whose quick requests would outnumber them
        fired(watched, alert)
    with Load(server, 12):
        fired(watched, "TokensSlow", lambda: stall(server, 0.6))
    for _ in range(3):
        os.kill(server.engine_pid, signal.SIGKILL)
        server.wait_until("/ready", 503)
        statuses = set(iter(lambda: post(server, max_tokens=1), 200))  # asks until the next engine is ready
        assert statuses <= {503}
    fired(watched, "ServerErrors")
    fired(watched, "EngineRestarts")
    fired(watched, "EngineDown", lambda: kill_engines(server))
    server.process.kill()
    server.wait()
    fired(watched, "ServerDown")


def stall(server: Server, seconds: float) -> None:
    """Let the engine do nothing for a while."""
    os.kill(server.engine_pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(server.engine_pid, signal.SIGCONT)


def kill_engines(server: Server) -> None:
    """Whichever start or run."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread, or the child, has ended since
            for pid in (task / "children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


def connections(server: Server, number: int) -> list[socket.socket]:
    address = urlsplit(server.url)
    return [socket.create_connection((address.hostname, address.port)) for _ in range(number)]
