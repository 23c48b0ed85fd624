"""Replicas that Ray holds: as many as there is work for, replaced when they die, and no request lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.cluster.ray_replica import Ports
from recipes.schema.recipe import ROOT
from scripts import on_ray
from tests.patience import PATIENCE_S
from tests.serving.router.under_fire import fleet

TINY = "recipes/tiny/cpu.yaml"
HEAD = """
import sys
from ray.cluster_utils import Cluster

options = {"num_cpus": 4, "object_store_memory": 10**8, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=options)
try:
    print(f"listening at {cluster.address},", file=sys.stderr, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""


def asked(*arguments: str) -> Any:
    return on_ray.fleet(on_ray.parser().parse_args([*arguments]))


def test_a_command_line_is_what_each_replica_runs() -> None:
    events = "cache.events=tcp://127.0.0.1:5557"
    found = asked("--replicas", "2:4", "--nodes", "2", "serve", TINY, events, "parallel.tensor=4")
    assert (found.bounds.least, found.bounds.most, found.bounds.slots) == (2, 4, 32)
    options, environment = found.job.command(Ports(8001, 8002, 8003), ["10.0.0.1", "10.0.0.2"])
    assert options[:4] == ["serve", TINY, events, "parallel.tensor=4"]
    assert options[4:8] == ["--host", "127.0.0.1", "--port", "8001"]
    assert options[8:] == ["cache.events=tcp://127.0.0.1:8003", "parallel.nodes=[10.0.0.1,10.0.0.2]"]
    assert environment == {"MASTER_PORT": "8002"}, "several replicas may lead from one machine"
    found = asked("--replicas", "3", "serve", "recipes/tiny/npu.yaml", "parallel.tensor=8")
    assert (found.bounds.least, found.bounds.most, found.job.devices) == (3, 3, {"NPU": 8.0})
    assert found.job.command(Ports(1, 2, 3), ["a"])[1] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", TINY], "the verb is 'generate'; say serve RECIPE"),
        (["serve", TINY, "--port", "8001"], "each replica has a port of its own; leave it out"),
        (["serve"], "no recipe is among the arguments"),
        (["serve", TINY, "parallel.nodes=[a]"], "Ray chooses the nodes; leave it out"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked("--replicas", "1:2", *arguments)


@pytest.mark.parametrize("text", ["0:1", "1:x", "1:2:3", ":", "1:9999"])
def test_bounds_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("--replicas", text, "serve", TINY)
    assert "must be an integer from 1 to 1024" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--replicas is 3:2"):
        asked("--replicas", "3:2", "serve", TINY)


def test_an_agent_ends_with_what_it_holds(tmp_path: Path) -> None:
    """`launch.sh` runs what PYTHON names; here a process that says its number and sleeps for long."""
    told = tmp_path / "told"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/bash\n[[ $2 == scripts.serve ]] || exec {sys.executable} "$@"\n'
                    f"trap '' TERM\necho $$ >{told}\nwhile :; do sleep 0.1; done\n")  # fmt: skip
    fake.chmod(0o755)
    code = (
        "import sys, time\nfrom recipes.cluster.ray_replica import ReplicaAgent, ReplicaJob\n"
        "agent = ReplicaAgent()\n_, ports = agent.where()\n"
        f"agent.start(*ReplicaJob(({TINY!r},), 1, {{}}).command(ports, ['a']))\n"
        "assert agent.status() is None\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHON": str(fake), "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        until(lambda: told.exists() and told.read_text().endswith("\n"))
        held = int(told.read_text())
        assert is_there(held), "nothing ends it but its agent: a signal that it may ignore does not"
    finally:
        agent.kill()
        agent.wait()
    until(lambda: not is_there(held))


def is_there(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False


def until(holds: Callable[[], bool], show: Callable[[], object] = str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, f"it never came to hold: {show()}"
        time.sleep(0.05)


class Process:
    """A command of ours; `log` is what it has said so far."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.log = list[str]()
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._reader = threading.Thread(target=lambda: self.log.extend(self._lines()), daemon=True)
        self._reader.start()

    def _lines(self) -> Iterator[str]:
        assert self.process.stderr is not None
        yield from self.process.stderr

    def address(self) -> str:
        until(lambda: any("listening at" in line for line in self.log) or self.process.poll() is not None)
        (line,) = [line for line in self.log if "listening at" in line][:1] or [f"none: {self.log}"]
        return line.partition("listening at ")[2].partition(",")[0]

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stderr.close()


@contextmanager
def running(*command: str, **environment: str) -> Iterator[Process]:
    process = Process(*command, **environment)
    try:
        yield process
    finally:
        if process.process.poll() is None and "-c" not in command:
            process.process.terminate()
        process.end()


class Clients:
    """Each asks again and again, until it is to end; `ends` counts what came of it."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.url, self.max_tokens = url, max_tokens
        self.ends = Counter[str]()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(count)]
        for each in self._threads:
            each.start()

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self._is_over.is_set():
                text = f"{number} times {time.monotonic()} upon a time there was " * 12
                body = {"prompt": text, "max_tokens": self.max_tokens, "ignore_eos": True, "stream": True}
                with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                    data = response.read()
                if response.status_code == 200 and data.rstrip().endswith(b"data: [DONE]"):
                    self.ends["whole"] += data.count(b'"finish_reason":"length"')
                elif b'"code":"replica_lost"' in data and b"[DONE]" not in data:
                    self.ends["told"] += 1
                else:
                    self.ends[f"{response.status_code} {data[-300:]!r}"] += 1

    def end(self) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join(PATIENCE_S)
            assert not each.is_alive()


def ready(url: str, least_open: int = 0) -> list[str]:
    """The replicas that take requests, and have so many."""
    return [
        each["url"]
        for each in fleet(url)["replicas"]
        if each["state"] == "ready" and not each["leaves"] and each["open"] >= least_open
    ]


def held_at(url: str) -> tuple[int, set[int]]:
    """The agent of the server at this address, and all processes that the agent has started."""
    parents, server = dict[int, int](), 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "scripts.serve" in words and url.rpartition(":")[2] in words:
            server = int(path.name)
    assert server, f"nobody serves {url}"
    found, more = set[int](), {server}
    while more - found:
        found |= more
        more = {each for each, parent in parents.items() if parent in found}
    return parents[server], found


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
def test_replicas_come_die_and_go() -> None:
    """A crowd brings a second one, whose agent is killed; when the crowd is gone, one goes."""
    pytest.importorskip("ray", reason="bash scripts/setup.sh ray installs it")
    with (
        running("-c", HEAD) as head,
        running("-m", "scripts.route", "--recipe", TINY, "--port", "0") as route,
    ):
        url = route.address()
        options = ("--replicas", "1:2", "--router", url, "--queued-tokens", "1000", "--more-after-s", "0")
        command = ("-m", "scripts.on_ray", *options, "--fewer-after-s", "3", "serve", TINY)
        changed = ("server.spare_engine=false", "cache.events=tcp://127.0.0.1:1", "scheduler.num_slots=4")
        with running(*command, *changed, RAY_ADDRESS=head.address()) as replicas:

            def show() -> object:
                return fleet(url), replicas.log[-15:]

            until(lambda: len(ready(url)) == 1, show)
            crowd = Clients(url, 8, 60)
            until(lambda: len(ready(url, least_open=1)) == 2, show)
            second = ready(url)[1]
            agent, held = held_at(second)
            os.kill(agent, signal.SIGKILL)
            until(lambda: not any(map(is_there, held)))
            until(lambda: len({*ready(url)} - {second}) == 2, show)
            crowd.end()
            some = Clients(url, 1, 20)
            until(lambda: len(ready(url)) == 1, show)
            some.end()
        assert replicas.process.returncode == 0, replicas.log[-20:]
        told = fleet(url)
    assert {*crowd.ends} <= {"whole", "told"}, crowd.ends
    assert {*some.ends} == {"whole"}, some.ends
    assert told["open"] == told["waiting"] == 0
    assert told["cut_off"] == crowd.ends["told"]
    assert told["cut_off"] + told["sent_again"] >= 1, "it was at something"
