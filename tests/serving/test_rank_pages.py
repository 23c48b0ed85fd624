"""Prompts and answers on engines of any number of ranks: the tokens of one rank, whatever is lost between."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.request import Request
from kv_cache.states import GRID
from tests.models.families import VOCABULARY, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving import warm
from tests.serving.page_pair import Link, alone, prompts
from tests.serving.test_lost_ranks import followers, wait_for_end
from tests.thorough import cases

KEYS = "server.page_wait_s=300", "device.attention=reference"  # which divides pages of key-value heads

pytestmark = [pytest.mark.slow, pytest.mark.in_order]


class Cuts(Link):
    """Passes the frames of one connection after another on, each up to a frame at which it is cut."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("none", 0, "cut")
        self.num_connections = 0
        self.endpoint = f"tcp://127.0.0.1:{self(int(endpoint.rpartition(':')[2]))}"

    def serve(self, sock: socket.socket) -> None:
        self.counts = dict.fromkeys(self.counts, 0)
        self.num_connections += 1
        super().serve(sock)

    def drop(self) -> None:
        """End what is connected."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class RankEngine:
    """A process of `tests/serving/rank_engine.py` with so many ranks."""

    def __init__(self, ranks: str, endpoint: str, sources: Sequence[str], *more: str) -> None:
        self.ranks, self.endpoint = ranks, endpoint
        self.missed = 0  # pages that had not come, at its last answer
        asked = f"server.prompt_replicas=[{','.join(sources)}]"
        options = (*ranks.split(), f"server.pages_at={endpoint}", asked, *more)
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = warm.start_speaking("tests.serving.rank_engine", options, variables)

    def said(self) -> dict[str, Any]:
        """The next line that it prints; empty if it has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the engine says nothing"
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        self.missed = found.get("missed", 0)
        return found

    def begin(self, name: str, prompt: list[int], source: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"id": name, "prompt": prompt, "source": source}).encode() + b"\n"
        )
        self.process.stdin.flush()

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_engines_of_any_ranks_have_prompts_computed_by_each_other(opened: ExitStack) -> None:
    """1 to 2, 2 to 1, 2 to 4 and 4 to 2 ranks of two key-value heads, and 2 stages to 1 and back; four ranks
    divide pages. Two [all] ways are cut at each message, and ranks are killed.
    """
    if not warm.is_possible():
        pytest.skip("no process can be forked beside this one")
    one, two, four, stages = (f"tcp://127.0.0.1:{free_port()}" for _ in range(4))
    ways = [(one, two), (two, one), (two, four), (four, two), (stages, one), (one, stages)]
    between = {way: Cuts(way[0]) for way in ways}
    for each in between.values():
        opened.callback(each.close)
    ranks = {one: "parallel.tensor=1", two: "parallel.tensor=2", stages: "parallel.pipeline=2"}
    ranks[four] = "parallel.tensor=4 parallel.context=2"
    engines = {
        each: RankEngine(ranks[each], each, [between[way].endpoint for way in ways if way[1] == each], *KEYS)
        for each in ranks
    }
    for engine in engines.values():
        opened.callback(engine.kill)
    for engine in engines.values():
        assert engine.said(), "it did not begin"
    asked = (prompts(1, shared=0, seed=seed)[0] for seed in itertools.count(2))
    for way in ways:
        request = next(asked)
        engines[way[1]].begin(request.id, request.prompt.tolist(), between[way].endpoint)
        found = engines[way[1]].said()
        assert (found["answer"], found["missed"], found["held"]) == (alone([request])[0], 0, 0), way
        assert found["cached"] == (len(request.prompt) - 1) // 8 * 8
    for way in cases([(one, two), (four, two)], ways):
        between[way].drop()
        _cut_at_each_message(engines[way[0]], engines[way[1]], between[way], asked)
    lost, again = prompts(2, shared=0, seed=1)
    _lose_a_rank(engines[four], engines[four], lost, between[two, four].endpoint)
    assert not engines[four].said(), "an engine does not go on without a rank"
    engines[two].begin("r", again.prompt.tolist(), between[one, two].endpoint)
    assert engines[two].said()["answer"] == alone([again])[0], "who has sent pages to it goes on"
    _lose_a_rank(engines[two], engines[one], lost, between[two, one].endpoint)
    found = engines[one].said()
    assert found["answer"] == alone([lost])[0], "it is computed here"
    assert found["missed"]
    assert not found["held"]
    for left in (one, stages):
        assert engines[left].close() == 0


def _cut_at_each_message(
    source: RankEngine, target: RankEngine, between: Cuts, asked: Iterator[Request]
) -> None:
    """One prompt after another, until each message of either side was cut."""
    for between.of in ("answers", "prompts"):
        between.number = 0
        for request in itertools.islice(asked, 100):
            num_connections, missed = between.num_connections, target.missed
            target.begin(request.id, request.prompt.tolist(), between.endpoint)
            found = target.said()
            assert found["answer"] == alone([request])[0], (source.ranks, target.ranks, between.of)
            assert not found["held"]
            if between.num_connections == num_connections:
                continue  # it had not noticed the end of the connection before
            if between.counts[between.of] > between.number:
                between.number += 1
            elif target.missed == missed:
                break
        else:
            raise AssertionError("no prompt comes whole")
        assert found["cached"] == (len(request.prompt) - 1) // 8 * 8
        # Hello and the wish, or welcome, a part of each of two layers, and the end; what frees the window may
        # pass later than the answer is said
        assert between.number >= (2 if between.of == "answers" else 4)
        between.drop()
    until_s = time.monotonic() + PATIENCE_S
    while True:  # wait until it has noticed that the last transfer is over
        source.begin(request.id, request.prompt.tolist())
        if not source.said()["held"]:
            return
        assert time.monotonic() < until_s, "pages of cut transfers are held"


def _lose_a_rank(losing: RankEngine, asked: RankEngine, request: Request, source: str) -> None:
    """Kill a rank that follows, while it stands still within the transfer of a prompt."""
    rank = followers(losing.process.pid)[0]
    os.kill(rank, signal.SIGSTOP)
    asked.begin("lost", request.prompt.tolist(), source)
    os.kill(rank, signal.SIGKILL)
    wait_for_end(rank)


def test_ranks_exchange_the_states_that_they_divide(opened: ExitStack, tmp_path: Path) -> None:
    """1 to 2 ranks and 2 to 1, of two key heads; the states decay slowly, so that a wrong part shows."""
    path = make(next(each for each in RECURRENT_VARIANTS if each.name == "qwen3_5"), tmp_path)[1]
    keys = (
        *("model.config=null", f"model.path={path}", "model.weights=checkpoint", "cache.page_size=16"),
        *("cache.num_pages=40", f"scheduler.max_batch_tokens={GRID + 2}", "scheduler.max_request_tokens=200"),
    )
    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    engines = {
        one: RankEngine("parallel.tensor=1", one, [two], "server.page_wait_s=300", *keys),
        two: RankEngine("parallel.tensor=2", two, [one], "server.page_wait_s=300", *keys),
    }
    for engine in engines.values():
        opened.callback(engine.kill)
    for engine in engines.values():
        assert engine.said(), "it did not begin"
    random = np.random.default_rng(2)
    for number, (source, target) in enumerate([(one, two), (two, one)]):
        prompt = random.integers(1, VOCABULARY, 150).tolist()
        engines[target].begin(f"r{number}", prompt, source)
        found = engines[target].said()
        assert (found["cached"], found["missed"], found["held"]) == (2 * GRID, 0, 0)
        engines[source].begin(f"s{number}", prompt)
        assert engines[source].said()["answer"] == found["answer"]
    for engine in engines.values():
        assert engine.close() == 0
