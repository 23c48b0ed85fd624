"""A server like OpenAI's whose tokens come at times that are known: a stand-in, not an engine.

It says one word a token. The prompt's ids choose what happens: `FAULTS` by the first one. Time is real, so
tests hold its figures only to what cannot be otherwise.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.patience import PATIENCE_S

FAULTS = dict(enumerate(("refuses", "busy", "breaks off", "errs", "no stream", "no reason", "slow"), 900))


@dataclass
class Stub:
    """How it answers, and what it was asked."""

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens_in_piece: int = 1
    tells_usage: bool = True  # in each chunk, if asked
    metrics: bool = True
    info: dict[str, Any] | None = None  # what it says of itself; None: it has no such path
    unready: int = 0  # so many requests are told that it starts
    asked: list[dict[str, Any]] = field(default_factory=list)
    on_their_way: int = 0
    most: int = 0
    url: str = ""
    over: asyncio.Event = field(init=False)  # the server ends

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.unready:
            self.unready -= 1
            return web.json_response({"error": {"message": "it starts"}}, status=503)
        ids = body.get("prompt") or [1]
        fault = FAULTS.get(ids[0])
        self.asked.append(body)
        if fault == "refuses":
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        if fault == "busy":
            return web.json_response({"error": "busy"}, status=429, headers={"Retry-After": "0"})
        if fault == "no stream":
            return web.json_response({"choices": [{"text": "all at once"}]})
        self.on_their_way += 1
        self.most = max(self.most, self.on_their_way)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        try:
            await self.stream(body, len(ids), fault, response)
        finally:
            self.on_their_way -= 1
        return response

    async def stream(
        self, body: dict[str, Any], num_prompt: int, fault: str | None, response: web.StreamResponse
    ) -> None:
        chat = "messages" in body
        count = body["max_completion_tokens" if chat else "max_tokens"]
        options = body.get("stream_options") or {}
        usage_in_each = self.tells_usage and bool(options.get("continuous_usage_stats"))

        async def send(choices: list[dict[str, Any]], tokens: int, *, usage: bool) -> None:
            cached = {"cached_tokens": num_prompt // 3}
            used = {"prompt_tokens": num_prompt, "completion_tokens": tokens, "prompt_tokens_details": cached}
            chunk = {"id": "x", "choices": choices, **({"usage": used} if usage else {})}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        if chat:
            await send([{"index": 0, "delta": {"role": "assistant", "content": ""}}], 0, usage=usage_in_each)
        await (self.over.wait() if fault == "slow" else asyncio.sleep(self.first_s))
        for start in range(0, count, self.tokens_in_piece):
            if start:
                await asyncio.sleep(self.gap_s)
            stop = min(count, start + self.tokens_in_piece)
            text = "word " * (stop - start)
            choice = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}
            choice["finish_reason"] = None if stop < count or fault == "no reason" else "length"
            await send([choice], stop, usage=usage_in_each)
            if fault == "breaks off" and stop > 1:
                response.force_close()
                assert response._req is not None
                assert response._req.transport is not None
                response._req.transport.abort()
                return
            if fault == "errs":
                await response.write(b'data: {"error": {"message": "out of cards"}}\n\ndata: [DONE]\n\n')
                return
        if (body.get("stream_options") or {}).get("include_usage"):
            await send([], count, usage=True)
        await response.write(b"data: [DONE]\n\n")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub", "recipe": {"model": "none"}}]})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.info is None else web.json_response(self.info)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def figures(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        told = {
            "vllm:num_requests_running": self.on_their_way,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0.25,
            "vllm:prefix_cache_queries_total": 10 * len(self.asked),
            "vllm:prefix_cache_hits_total": 4 * len(self.asked),
            "vllm:num_preemptions_total": len(self.asked),
            "vllm:request_prefill_time_seconds_sum": 0.02 * len(self.asked),
            "vllm:request_prefill_time_seconds_count": len(self.asked),
        }
        lines = [f'{name}{{engine="0",model_name="a b"}} {value}\n' for name, value in told.items()]
        return web.Response(text="# HELP x y\n" + "".join(lines))


@contextmanager
def running(stub: Stub, port: int = 0) -> Iterator[Stub]:
    """The server on a port, by default a free one, in a thread of its own."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    stub.over = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", stub.answer)
        app.router.add_post("/v1/chat/completions", stub.answer)
        app.router.add_get("/v1/models", stub.models)
        app.router.add_get("/health", stub.health)
        app.router.add_get("/server_info", stub.server_info)
        app.router.add_get("/metrics", stub.figures)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stub.over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stub.over.set)
        thread.join(PATIENCE_S)
        loop.close()
