"""Prompts and answers on engines of any number of ranks: the tokens of one rank, whatever is lost between."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.request import Request
from kv_cache.states import GRID
from tests.models.families import VOCABULARY, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.patience import PATIENCE_S
from tests.serving import warm
from tests.serving.page_pair import alone, prompts
from tests.serving.test_lost_ranks import followers, wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.in_order]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class RankEngine:
    """A process of `tests/serving/rank_engine.py` with so many ranks."""

    def __init__(self, ranks: str, endpoint: str, sources: Sequence[str], *more: str) -> None:
        self.ranks, self.endpoint = ranks, endpoint
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
    """1 to 2, 2 to 1, 2 to 4 and 4 to 2 ranks of two key-value heads, and 2 stages to 1; ranks are killed."""
    if not warm.is_possible():
        pytest.skip("no process can be forked beside this one")
    one, two, four, stages = (f"tcp://127.0.0.1:{free_port()}" for _ in range(4))
    engines = {
        one: RankEngine("parallel.tensor=1", one, [two, stages], "server.page_wait_s=300"),
        two: RankEngine("parallel.tensor=2", two, [one, four], "server.page_wait_s=300"),
        four: RankEngine("parallel.tensor=4", four, [two], "server.page_wait_s=300"),
        stages: RankEngine("parallel.pipeline=2", stages, [one], "server.page_wait_s=300"),
    }
    for engine in engines.values():
        opened.callback(engine.kill)
    for engine in engines.values():
        assert engine.said(), "it did not begin"
    ways = [(one, two), (two, one), (two, four), (four, two), (stages, one), (one, stages)]
    requests = prompts(2 * len(ways), shared=0)
    want = alone(requests)
    for number, (request, tokens) in enumerate(zip(requests, want)):
        source, target = ways[number % len(ways)]
        engines[target].begin(request.id, request.prompt.tolist(), source)
        found = engines[target].said()
        assert found == {
            "answer": tokens,
            "cached": (len(request.prompt) - 1) // 8 * 8,
            "missed": 0,
            "held": 0,
        }, (engines[source].ranks, engines[target].ranks)
    lost, again = prompts(2, shared=0, seed=1)
    _lose_a_rank(engines[four], engines[four], lost, two)
    assert not engines[four].said(), "an engine does not go on without a rank"
    engines[two].begin("r", again.prompt.tolist(), one)
    assert engines[two].said()["answer"] == alone([again])[0], "who has sent pages to it goes on"
    _lose_a_rank(engines[two], engines[one], lost, two)
    found = engines[one].said()
    assert found["answer"] == alone([lost])[0], "it is computed here"
    assert found["missed"]
    assert not found["held"]
    for left in (one, stages):
        assert engines[left].close() == 0


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
