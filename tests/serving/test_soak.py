"""A server's memory does not grow with the requests that it has served.

SOAK_REQUESTS=50000 python -m pytest -s tests/serving/test_soak.py
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from benchmark.serve.overload import steady_slope
from tests.serving.server import TINY, Server

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "6000"))
NUM_AT_ONCE = 64
NUM_ROUNDS = 40  # memory is read after each
# Pools of memory and the prefix cache fill, the heap meets the largest batches
NUM_WARM = min(6000, NUM_REQUESTS // 2)  # requests
# oneDNN keeps a kernel for each shape of batch, up to 1,024: a bound that batches reach at random times
NO_KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
MOST_BYTES = 64  # a request
NOISE_BYTES = 2 * 2**20  # memory may move so much for other reasons


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def body(draw: random.Random, number: int) -> tuple[str, dict[str, object], int]:
    """A request of any kind, the path that it goes to, and the status that it gets."""
    prompt = "".join(draw.choices("0123456789+= abc", k=draw.randint(1, 60)))
    asked: dict[str, object] = {"max_tokens": draw.randint(1, 6), "user": f"user {number}"}
    kind = draw.randrange(12)
    if kind == 0:
        return "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": prompt}]}, 200
    if kind == 1:
        return "/v1/completions", asked | {"prompt": prompt, f"field{number}": 1}, 400
    if kind == 2:
        return f"/nowhere/{number}", asked, 404
    if kind == 3:
        return "/tokenize", {"prompt": prompt}, 200
    more: list[dict[str, object]] = [
        {"stream": True},
        {"n": 3, "logprobs": 2},
        {"stop": [prompt[:1], str(number)]},
        {"cache_salt": str(number)},
        {"max_tokens": 10_000_000},
        {"temperature": 0},
        {"seed": number},
        {"best_of": 2, "stream": True, "stream_options": {"include_usage": True}},
    ]
    chosen = more[kind - 4]
    return "/v1/completions", {**asked, "prompt": prompt, **chosen}, 400 if "0_000" in repr(chosen) else 200


async def ask(client: aiohttp.ClientSession, number: int) -> None:
    path, asked, status = body(random.Random(number), number)
    async with client.post(path, json=asked) as response:
        assert response.status == status or 10_000_000 in asked.values(), await response.text()
        if asked.get("stream") and number % 2:
            return  # goes away in the middle
        await response.read()


async def soak(server: Server) -> tuple[list[int], list[list[int]]]:
    """How many requests were served at each reading, and the memory of both processes in bytes."""
    pids = server.process.pid, server.engine_pid
    counts, readings, number = [], [], 0
    async with aiohttp.ClientSession(server.url) as client:
        for _ in range(NUM_ROUNDS):
            waiting = iter(range(number, number + NUM_REQUESTS // NUM_ROUNDS))

            async def work() -> None:
                for each in waiting:  # noqa: B023 - all have ended before the next round
                    await ask(client, each)

            await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
            number += NUM_REQUESTS // NUM_ROUNDS
            counts.append(number)
            readings.append([resident_bytes(pid) for pid in pids])
    return counts, readings


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NUM_WARM >= 3000, "SOAK_REQUESTS: 6000 is the least"
    monkeypatch.setenv(*NO_KERNELS_KEPT)
    # Fresh, since what a fork has in common with others is no memory of its own
    server = Server(TINY, "server.max_requests=4096", "cache.num_pages=256", is_fresh=True).ready()
    try:
        counts, readings = asyncio.run(soak(server))
    finally:
        server.close()
    first = int(np.searchsorted(counts, NUM_WARM))
    served = counts[-1] - counts[first]
    for name, memory in zip(("the server", "its engine"), np.array(readings, dtype=np.float64).T):
        slope = steady_slope(np.array(counts[first:], dtype=np.float64), memory[first:])
        print(
            f"{name}: {memory[first] / 2**20:.1f} MiB after {counts[first]} requests, "
            f"{memory[-1] / 2**20:.1f} MiB after {counts[-1]}, {slope:.1f} bytes a request"
        )
        assert slope * served <= MOST_BYTES * served + NOISE_BYTES
