"""How does an engine serve from a process of its own?

    python -m serving.engine.worker SOCKET RECIPE [key=value ...] [--profile NAME]

It begins when it reads a byte from its standard input. It takes requests from the socket, steps while there
is work, and tells each step's tokens as soon as they are known. It knows no text. A step that fails ends the
process, with the reason on stderr: its parent answers the requests and starts another. It ends when its
parent does, however that ends.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time

import numpy as np
import zmq

from continuous_batching.engine import Engine, Step
from continuous_batching.inspection import Recount, recount, usage
from continuous_batching.queueing.limits import QueueFull
from continuous_batching.request import Request
from continuous_batching.scheduling.validation import longest_allowed
from kv_cache.storage import KVCache
from serving.engine.messages import (
    Add,
    Beat,
    Begun,
    Ended,
    Facts,
    Finish,
    Found,
    FromEngine,
    Look,
    Ready,
    Refused,
    Stepped,
    StepTimes,
    View,
    decode_to_engine,
    encode,
)
from serving.engine.timed_runner import TimedRunner

BEAT_S = 0.25  # between signs of life
_IDLE_MS = 1  # between looks at a queue that waits for a fuller batch
_RECOUNTS_COST = 1000  # a recount is followed by so many times the time that it took

log = logging.getLogger(__name__)


class Worker:
    """An engine and the socket that it listens to."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], facts: Facts) -> None:
        self._engine = engine
        self._socket = socket
        self._facts = facts
        self._clock = TimedRunner(engine.runner)
        engine.runner = self._clock
        self._requests: dict[int, Request] = {}  # those not told the end of
        self._stream_of: dict[str, int] = {}
        # Of those, the ones without a token so far; and whose prompt's log-probabilities are to be told then
        self._silent: dict[int, list[Request]] = {}
        self._beat_s = -np.inf
        self._ledger = Recount(0, 0)
        self._recount_s = -np.inf  # when the next is due

    def serve(self) -> None:
        """Go on for ever."""
        self._tell(Ready(self._facts))
        stepped = True
        while True:
            self._beat()
            self._take(0 if stepped else _IDLE_MS if self._engine.has_work else int(BEAT_S * 1e3))
            step = self._engine.step() if self._engine.has_work else None
            stepped = step is not None
            if step is not None:
                self._tell_step(step)

    def _take(self, wait_ms: int) -> None:
        """Do what the socket holds; wait for the first message so long."""
        if not self._socket.poll(wait_ms):
            return
        while True:
            try:
                message = decode_to_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case Add():
                    self._add(message)
                case Finish(stream, reason):
                    self._finish(stream, reason)
                case Look():
                    self._tell(self._view())

    def _add(self, message: Add) -> None:
        prompt = np.frombuffer(message.prompt, dtype=np.int32)
        arrival_s = self._engine.clock() - message.age_s
        leader, *followers = (
            Request(
                id=name,
                prompt=prompt,
                params=params,
                tenant=message.tenant,
                cache_salt=message.cache_salt,
                priority=message.priority,
                arrival_s=arrival_s,
                timeout_s=message.timeout_s,
            )
            for name, params in zip(message.ids, message.samples)
        )
        leader.followers = followers
        try:
            self._engine.add(leader)
        except ValueError as error:
            retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
            self._tell(Refused(message.stream, str(error), retry_after_s))
            return
        untold = [leader]  # once for all its samples: they may be megabytes
        for stream, request in enumerate((leader, *followers), message.stream):
            self._requests[stream] = request
            self._stream_of[request.id] = stream
            self._silent[stream] = untold

    def _finish(self, stream: int, reason: str) -> None:
        request = self._requests.get(stream)
        if request is not None and self._engine.finish(request.id, reason) is not None:
            self._tell(Stepped([], [], [], [], [self._end(request)], StepTimes(0, 0, 0, 0, 0)))

    def _tell_step(self, step: Step) -> None:
        streams, tokens, logprobs, begun = [], [], [], []
        for index, (row, token) in enumerate(zip(step.owners.tolist(), step.sampled.tokens.tolist())):
            request = self._engine.slots.requests[row]
            stream = self._stream_of.get(request.id)
            if stream is None or token < 0 or request.params.beam_width:
                continue  # ended before this step, or told by its end alone
            if request.finish_reason not in (None, "stop", "length"):
                continue
            if stream in self._silent:
                untold = self._silent.pop(stream)
                told = untold.pop().prompt_logprobs if untold else []
                begun.append(Begun(stream, request.num_cached_tokens, told))
            streams.append(stream)
            tokens.append(token)
            logprobs.append(step.sampled.logprobs.get(index))
        ended = [self._end(request) for request in step.finished if request.id in self._stream_of]
        if not step.sampled.logprobs:
            logprobs = []
        self._tell(Stepped(streams, tokens, logprobs, begun, ended, self._times(step)))

    def _times(self, step: Step) -> StepTimes:
        batch, slots = step.batch, self._engine.slots
        starts, rows = batch.starts, batch.slots
        num_prompt = np.maximum(np.minimum(batch.stops, slots.num_prompt[rows]) - starts, 0).sum()
        return StepTimes(
            step.end_s - step.start_s, self._clock.taken(), batch.num_spans, batch.num_tokens, int(num_prompt)
        )

    def _end(self, request: Request) -> Ended:
        stream = self._stream_of.pop(request.id)
        del self._requests[stream]
        self._silent.pop(stream, None)
        admitted_s, first_s, finish_s = request.admitted_s, request.first_token_s, request.finish_s
        return Ended(
            stream,
            request.finish_reason or "",
            request.error,
            len(request.answer),
            request.num_cached_tokens,
            request.num_preemptions,
            _between(request.arrival_s, admitted_s),
            _between(admitted_s, first_s),
            _between(first_s, finish_s),
            [
                Found(
                    each.tokens.tolist(),
                    each.cumulative_logprob,
                    each.score,
                    each.finish_reason,
                    list(each.logprobs),
                )
                for each in request.hypotheses
            ],
        )

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._beat_s + BEAT_S:
            self._beat_s = now_s
            scheduler = self._engine.scheduler
            gauges = usage(scheduler, self._facts.page_bytes)
            ledger = self._recount(now_s)
            num_shared = min(ledger.shared_pages, gauges.held_pages)  # the recount may be of a while ago
            self._tell(Beat(gauges, scheduler.counters, scheduler.held_back, num_shared, ledger.wrong_pages))

    def _recount(self, now_s: float) -> Recount:
        """The last ledger, or another where that costs a thousandth of the time."""
        if now_s >= self._recount_s:
            before, self._ledger = self._ledger, recount(self._engine.scheduler)
            self._recount_s = time.monotonic() + _RECOUNTS_COST * (time.monotonic() - now_s)
            if self._ledger.wrong_pages > before.wrong_pages:
                log.error("%d pages are not held as their holders say", self._ledger.wrong_pages)
        return self._ledger

    def _view(self) -> View:
        slots, scheduler = self._engine.slots, self._engine.scheduler
        rows: list[tuple[int, int, int, int] | None] = [None] * slots.num_slots
        for row in slots.busy.tolist():
            stream = self._stream_of.get(slots.requests[row].id, -1)
            counts = slots.num_tokens[row], slots.num_computed[row], slots.num_pages[row]
            rows[row] = (stream, *map(int, counts))
        holders = scheduler.pool.holders
        cached = np.zeros(len(holders), dtype=np.uint8)
        cached[scheduler.prefix.pages] = 1
        return View(rows, np.minimum(holders, 255).astype(np.uint8).tobytes(), cached.tobytes())

    def _tell(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


def _between(since_s: float | None, until_s: float | None) -> float | None:
    return None if since_s is None or until_s is None else max(0.0, until_s - since_s)


def facts_of(engine: Engine, device: str) -> Facts:
    """What the server needs to know of an engine."""
    config, scheduler = engine.runner.config, engine.scheduler
    page_size, host = engine.slots.page_size, scheduler.host_pool
    return Facts(
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_tokens=longest_allowed(engine.slots, scheduler.pool),
        num_slots=engine.slots.num_slots,
        num_pages=scheduler.pool.num_pages,
        page_size=page_size,
        page_bytes=KVCache.page_bytes(
            config.num_layers, page_size, config.num_kv_heads, config.head_dim, config.dtype
        ),
        num_host_pages=0 if host is None else host.num_pages,
        device=device,
        parameters=config.num_parameters,
        max_batch_tokens=scheduler.max_batch_tokens,
    )


def _end_with_parent() -> None:
    """Our standard input is a pipe that only our parent holds open: it closes when that is gone."""

    def wait() -> None:
        os.read(0, 1)  # through no buffer, whose lock an end of ours by itself would wait for
        os._exit(0)  # the engine may be in the middle of a step, and nobody waits for it

    threading.Thread(target=wait, daemon=True).start()


def main(argv: list[str]) -> int:
    """Build the engine and serve; 2 for a recipe that cannot be used."""
    options = argparse.ArgumentParser(prog="python -m serving.engine.worker")
    options.add_argument("socket")
    options.add_argument("recipe")
    options.add_argument("overrides", nargs="*")
    options.add_argument("--profile")
    asked = options.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they mean the server, which ends us in its own time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    from recipes.build.engine import build
    from recipes.build.machine import start
    from recipes.schema.reader import load

    if not os.read(0, 1):  # what is imported so far is what a spare process has ready
        return 0
    _end_with_parent()
    try:
        recipe = load(asked.recipe, asked.overrides, asked.profile)
        engine = build(recipe)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    gc.collect()
    gc.freeze()  # what is here stays: to look through it once more holds up a step by a tenth of a second
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)  # bounded by the requests that the server lets in
    socket.connect(asked.socket)
    Worker(engine, socket, facts_of(engine, start(recipe.device).name)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
