"""Servers that are killed find their pages again, and those of others, in a tier that outlives them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.kv_cache import redis_server
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, started
from tests.serving.test_lost_ranks import followers
from tests.thorough import cases

PAGE_SIZE, NUM_PROMPTS, LONG = 16, 8, 100
PROMPTS = np.random.default_rng(4).integers(10, 300, (NUM_PROMPTS, LONG)).tolist()
FINDABLE = (LONG - 1) // PAGE_SIZE * PAGE_SIZE * NUM_PROMPTS


def served(*tier: str, more: tuple[str, ...] = ()) -> Server:
    asked = f"cache.tier={{{', '.join(tier)}, gib: 0.2, wait_s: 30}}"
    return started((TINY, "cache.host_gib=0.05", asked, *more))


def asked(server: Server) -> tuple[list[str], int]:
    """The answers to all prompts, and how many of their tokens were found."""
    texts, found = [], 0
    for prompt in PROMPTS:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        texts.append(answer["choices"][0]["text"])
        found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return texts, found


def told(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text


def counted(server: Server, result: str) -> int:
    """Pages, by what became of them in the tier."""
    match = re.search(rf'^cb_kv_tier_pages_total{{.*result="{result}"}} (\S+)$', told(server), re.MULTILINE)
    assert match is not None
    return int(float(match[1]))


def until(holds: Callable[[], bool]) -> None:
    """The engine tells its figures with its beats, and not with the answers."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it never came to hold"
        time.sleep(0.05)


def kill(server: Server, num_written: int) -> None:
    """`kill -9` of the server, when so many pages are written; its engine ends with it."""
    until(lambda: counted(server, "written") >= num_written)
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.slow
@pytest.mark.in_order
@pytest.mark.parametrize(
    ("ranks", "identities"),
    cases([("parallel.pipeline=2", 2)], [("parallel.pipeline=2", 2), ("parallel.tensor=2", 1)]),
)
def test_two_ranks_find_their_pages_again_and_a_rank_that_is_killed_meanwhile_loses_none(
    ranks: str, identities: int, tmp_path: Path
) -> None:
    """Stages have other layers; tensor ranks hold the only head, so that their pages are one entry."""
    tier, num_pages = ("kind: disk", f"path: {tmp_path}"), FINDABLE // PAGE_SIZE
    more = (ranks, "device.threads=1", "server.step_timeout_s=300", "server.spare_engine=false")
    server = served(*tier, more=more)
    texts, found = asked(server)
    assert found == 0
    until(lambda: len([*tmp_path.glob("*/*/*")]) >= identities * num_pages)
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == identities
    kill(server, num_pages if identities > 1 else 0)
    server = served(*tier, more=more)
    try:
        again, found = asked(server)
        assert again == texts
        assert found >= 0.9 * FINDABLE
        until(lambda: counted(server, "found") == found // PAGE_SIZE)
        since = len(server.log)
        os.kill(server.engine_pid, signal.SIGKILL)
        server.wait_for("ready .*process", since)
        (follower,) = followers(server.engine_pid)
        os.kill(follower, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 6}
            url = f"{server.url}/v1/completions"
            told_of = thread.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
            until(lambda: counted(server, "found") > found // PAGE_SIZE)  # and waits for the other
            assert not told_of.done()
            since = len(server.log)
            os.kill(follower, signal.SIGKILL)
            assert told_of.result(PATIENCE_S).status_code == 503
        server.wait_for("ready .*process", since)
        again, found = asked(server)
        assert again == texts
        assert found >= 0.9 * FINDABLE
    finally:
        server.close()


@pytest.mark.slow
def test_a_server_finds_the_pages_of_another_in_redis_and_does_without_when_that_is_gone(
    tmp_path: Path,
) -> None:
    with redis_server.server(tmp_path) as (url, process):
        tier = "kind: redis", f"url: '{url}'"
        one, two = served(*tier), served(*tier)
        try:
            texts, _ = asked(one)
            kill(one, FINDABLE // PAGE_SIZE)
            again, found = asked(two)
            assert again == texts
            assert found >= 0.9 * FINDABLE
            process.kill()
            process.wait()
            body = {"model": "tiny", "prompt": PROMPTS[0][::-1], "max_tokens": 6}
            for _ in range(3):
                answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=PATIENCE_S)
                assert answer.status_code == 200
            two.wait_for("reading pages from .* fails, and is done without")
            said = [line for line in two.log if "is done without" in line and "reading" in line]
            assert len(said) == 1
            until(lambda: re.search(r"^cb_kv_tier_up{.*} 0", told(two), re.MULTILINE) is not None)
        finally:
            one.process.kill()
            two.close()
