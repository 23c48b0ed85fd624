"""Time refusals while those that were let in are served to their ends.

    THOROUGH=1 python -m pytest -n 0 -s tests/serving/test_overload.py

That they are told to come again, and the others served, is shown on few requests in test_faults.py.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, started
from tests.serving.test_shutdown import metrics, num_in, total
from tests.thorough import THOROUGH

NUM_ACCEPTED = 64
NUM_REFUSED = 9 * NUM_ACCEPTED  # ten times too many in all
REST_S = 0.005  # of the one that comes again and again
BODY = {"prompt": "One day", "max_tokens": 300, "ignore_eos": True}


async def overload(server: Server) -> list[float]:
    """How long each refusal took, in milliseconds."""
    taken_ms = []
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def served() -> int:
            async with client.post("/v1/completions", json=BODY | {"stream": True}) as response:
                assert response.status == 200
                return (await response.text()).count('"text":')

        accepted = [asyncio.ensure_future(served()) for _ in range(NUM_ACCEPTED)]
        until_s = time.monotonic() + PATIENCE_S
        while num_in(await metrics(client, server.url)) < NUM_ACCEPTED:
            assert time.monotonic() < until_s, "they do not come in"
            await asyncio.sleep(0.02)
        while len(taken_ms) < NUM_REFUSED and not any(each.done() for each in accepted):
            start_s = time.perf_counter()
            async with client.post("/v1/completions", json=BODY | {"max_tokens": 1}) as response:
                await response.read()
            if response.status == 200:  # the server had sent the end of another, which is not read here yet
                assert total(await metrics(client, server.url), "vllm:request_success_total") >= 2
                break
            assert (response.status, response.headers["retry-after"]) == (429, "1")
            taken_ms.append(1e3 * (time.perf_counter() - start_s))
            await asyncio.sleep(REST_S)
        assert set(await asyncio.gather(*accepted)) == {BODY["max_tokens"]}
    return taken_ms


@pytest.mark.skipif(not THOROUGH, reason="times need a machine at rest: THOROUGH=1 asks for them")
@pytest.mark.slow
def test_who_is_refused_is_told_at_once() -> None:
    server = started([TINY, f"server.max_requests={NUM_ACCEPTED}"])
    try:
        taken_ms = asyncio.run(overload(server))
    finally:
        server.close()
    assert taken_ms, "all was over before one was refused"
    p50, p99 = np.percentile(taken_ms, [50, 99])
    print(f"{len(taken_ms)} refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {max(taken_ms):.1f} ms")
