"""Take requests from a socket, run the engine, and send each step's tokens.

The worker steps while there is work, and handles tokens only, no text. A step that fails ends the process,
with the reason on stderr: the server then answers the requests with errors and starts another engine.

Adapters are read in threads, of each rank its own, without a step that waits for a file; only the copy to the
device happens between two steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import zmq

from borders.files import in_one_line
from borders.refusal import BadRequest
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Runner, Step
from continuous_batching.inspection import Recount, Usage, recount, tokens_not_found, usage
from continuous_batching.queueing import QueueFull
from continuous_batching.recording.agreement import RankQuestions, Settled
from continuous_batching.request import Request
from kv_cache.page_keys import KEY_BYTES
from models.step.profiler import StepProfiler
from recipes.assembly.rank_works import ADAPTER, ADAPTER_WAIT_S, AdapterAsked
from serving.adapters import AdapterPut, PutAdapter
from serving.engine.fence import Fence
from serving.engine.grammar_queue import GrammarQueue
from serving.engine.messages import (
    Add,
    AddAccepted,
    AddRefused,
    BeamHypothesis,
    Beat,
    Begun,
    EngineFacts,
    ExpertTable,
    Finish,
    FromEngine,
    Look,
    Pause,
    QueueRefused,
    Ready,
    RecordTrace,
    SampleEnd,
    Stepped,
    StepTimes,
    TierReading,
    ToEngine,
    TraceWritten,
    View,
    decode_to_engine,
    encode_whole,
)
from serving.engine.page_exchange import PageExchange
from serving.grammars.matching import Grammars, Spelling
from serving.own_processors import KnownProcessors

Result = TypeVar("Result")


class TimedRunner:
    """A runner that measures its own time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._taken_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def taken(self) -> float:
        """Return the seconds spent in the runner since the last call."""
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as the wrapped runner does."""
        return self._measured(lambda: self._runner.run(batch))

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a batch as the wrapped runner does; the wait for its result is measured too."""
        wait = self._measured(lambda: self._runner.start(batch))
        return lambda: self._measured(wait)

    def resize(self, num_pages: Sequence[int], copies: Any) -> None:
        """Resize the cache as the wrapped runner does."""
        self._runner.resize(num_pages, copies)

    def _measured(self, do: Callable[[], Result]) -> Result:
        start_s = time.perf_counter()
        try:
            return do()
        finally:
            self._taken_s += time.perf_counter() - start_s


class AdapterLoads:
    """Lets all ranks read an adapter, each its own part, and put it into its place between two steps.

    An adapter that one rank cannot read, or does not read in time, is put into no rank's place. One is asked
    for after the other, since ranks read them so, and each has its own time. `leave` is told of each place
    whose adapter another is about to replace.
    """

    def __init__(self, questions: RankQuestions, leave: Callable[[int], None]) -> None:
        self._questions, self._leave = questions, leave
        self._num_begun = 0
        self._waiting: deque[PutAdapter] = deque()  # the first one is being read
        self._done: list[AdapterPut] = []

    def begin(self, message: PutAdapter) -> None:
        """Begin to read an adapter, or let it wait for those before it."""
        self._waiting.append(message)
        if len(self._waiting) == 1:
            self._ask(message)

    def _ask(self, message: PutAdapter) -> None:
        self._num_begun += 1
        name = f"{message.number} {message.digest} {self._num_begun}"
        body = msgspec.msgpack.encode(AdapterAsked(message.number, message.folder, message.digest))
        self._questions.ask(ADAPTER, name, body, ADAPTER_WAIT_S, partial(self._settle, message))

    def take_done(self) -> list[AdapterPut]:
        """Return the answers to the messages whose adapters are in their places now, or cannot be."""
        done, self._done = self._done, []
        return done

    def _settle(self, message: PutAdapter, settled: Settled) -> None:
        if not settled.problem:
            self._leave(message.number)
        self._questions.decide(ADAPTER, settled.name, is_agreed=not settled.problem)
        self._done.append(AdapterPut(message.number, message.digest, settled.problem))
        self._waiting.popleft()
        if self._waiting:
            self._ask(self._waiting[0])


BEAT_S = 0.25  # interval between beats
_TRACING_S = 300.0  # longest time to begin or to write a trace, which may have millions of events
_IDLE_MS = 1  # interval between checks of a queue that waits for a fuller batch
_RECOUNTS_COST = 1000  # the pause after a recount of the pages, as a multiple of the recount's duration

if TYPE_CHECKING:
    from recipes.assembly.live_memory import LiveMemory

log = logging.getLogger(__name__)


class Worker:
    """An engine and the socket that it serves.

    `load_text` reads the tokenizer when a grammar first needs it; `read_experts` is given the time.
    """

    def __init__(
        self,
        engine: Engine,
        socket: zmq.Socket[bytes],
        facts: EngineFacts,
        load_text: Callable[[], Spelling | None] = lambda: None,
        read_experts: Callable[[float], ExpertTable | None] = lambda _: None,
        read_tier: Callable[[], TierReading | None] = lambda: None,
        processors: KnownProcessors | None = None,
        questions: RankQuestions | None = None,
        pages: PageExchange | None = None,
        profiler: StepProfiler | None = None,
        learned: Callable[[], str] = lambda: "",
        live: LiveMemory | None = None,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._facts, self._read_experts, self._read_tier = facts, read_experts, read_tier
        engine.runner = self._clock = TimedRunner(engine.runner)
        scheduler = engine.scheduler
        self._grammars = GrammarQueue(Grammars(load_text, scheduler.vocab_size, scheduler.eos_token_ids))
        self._questions = questions
        self._adapters = None if questions is None else AdapterLoads(questions, self._leave_adapter)
        self._pages, self._profiler, self._learned = pages, profiler, learned
        begun = self._num_begun, lambda: self._grammars.has_wanted
        self._fence = Fence(engine, questions, live, self._send, *begun, self._settle)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if pages is not None:
            self._poller.register(pages.wake.fd, zmq.POLLIN)
        engine.is_called = lambda: bool(self._poller.poll(0))
        self._processors = processors or KnownProcessors({}, scheduler.vocab_size)
        self._requests: dict[int, Request] = {}  # keyed by stream, until the stream's end is sent
        self._stream_of: dict[str, int] = {}
        # Streams without a token so far, each with its leader until the leader's prompt log-probabilities are
        # sent.
        self._silent: dict[int, list[Request]] = {}
        self._beat_s = -np.inf
        self._last_recount = Recount(0, 0)
        self._recount_s = -np.inf  # when the next recount is due

    def serve(self) -> None:
        """Serve for ever."""
        self._grammars.grammars.prepare()  # done now, since it would delay other requests later
        self._send(Ready(self._facts))
        stepped = True
        while True:
            self._beat()
            is_busy = self._has_work or len(self._grammars) or self._fence.is_busy or self._questions
            self._take(0 if stepped else _IDLE_MS if is_busy else int(BEAT_S * 1e3))
            if self._grammars:
                self._admit_compiled()
            if self._questions is not None and self._adapters is not None:
                self._questions.take()
                for done in self._adapters.take_done():
                    self._send(done)
            for each in self._pages.take() if self._pages is not None else ():
                if self._put(each.stream, each.leader):
                    self._finish_all(each.ends)
            for message in self._fence.advance():
                self._handle(message)
            step = self._engine.step() if self._has_work else None
            stepped = step is not None
            if step is not None:
                self._after(step)

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work and self._fence.may_step

    def _after(self, step: Step) -> None:
        """Send what a step has made, and do what follows it."""
        if self._pages is not None:
            self._pages.stepped(step)
        self._send_step(step)
        if self._profiler is not None and self._profiler.is_on and self._profiler.stepped():
            self._profile(self._profiler.end)

    def _settle(self) -> None:
        """Complete the steps in flight."""
        self._engine.drain()
        while self._engine.has_landed:
            step = self._engine.step()
            assert step is not None, "a step that has landed is returned"
            self._after(step)

    def _leave_adapter(self, number: int) -> None:
        """Let go of the adapter in this place, once what was begun with it has been computed with it.

        The last of several stages computes a step only when its result is asked for.
        """
        self._settle()
        if self._pages is not None:
            self._pages.leave_adapter(number)

    def _num_begun(self) -> int:
        """Return the number of samples that have begun, or another sample of whose request has."""
        waiting = {
            each.id
            for leader in self._engine.scheduler.waiting
            if not (leader.num_preemptions or leader.awaits_pages)
            for each in (leader, *leader.followers)
        }
        return sum(
            request.id not in waiting or not self._silent.get(stream)
            for stream, request in self._requests.items()
        )

    def _take(self, wait_ms: int) -> None:
        """Handle all messages in the socket; wait at most `wait_ms` for the first."""
        if not self._poller.poll(wait_ms):
            return
        while True:
            try:
                message = decode_to_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add() | Finish() if self._fence.holds(message):
                pass  # it comes again from `Fence.advance`
            case Add():
                self._add(message)
            case Finish(stream, reason):
                self._finish(stream, reason)
            case PutAdapter():
                assert self._adapters is not None, "the server asks only where adapters.most is set"
                self._adapters.begin(message)
            case Look():
                self._send(self._view())
            case RecordTrace(num_steps):
                assert self._profiler is not None, "the server asks only if server.profile is set"
                if num_steps:
                    self._profile(partial(self._profiler.begin, num_steps))
                elif self._profiler.is_on:  # else its end is on the way already
                    self._profile(self._profiler.end)
            case _:
                self._fence.take(message)

    def _profile(self, do: Callable[[], Path | None]) -> None:
        """Begin a trace or end it, which may take long; say when it is written or cannot be."""
        self._send(Pause(_TRACING_S))
        try:
            path = do()
        except (OSError, ValueError) as error:
            self._send(TraceWritten("", in_one_line(error)))
        else:
            if path is not None:
                self._send(TraceWritten(str(path), ""))

    def _add(self, message: Add) -> None:
        prompt, data = np.frombuffer(message.prompt, dtype=np.int32), message.page_keys
        page_keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
        arrival_s = self._engine.clock() - message.age_s
        leader, *followers = (
            Request(
                id=name,
                prompt=prompt,
                prompt_replica=message.prompt_replica,
                params=message.params if seed == message.params.seed else replace(message.params, seed=seed),
                tenant=message.tenant,
                cache_salt=message.cache_salt,
                adapter=message.adapter,
                priority=message.priority,
                arrival_s=arrival_s,
                timeout_s=message.timeout_s,
                known=np.frombuffer(message.known, dtype=np.int32),
            )
            for name, seed in zip(message.ids, message.seeds)
        )
        leader.followers, leader.page_keys = followers, page_keys
        if message.params.grammar is None:
            self._enqueue(message.stream, leader)
        else:
            self._grammars.add(message.stream, leader)

    def _admit_compiled(self) -> None:
        """Add the requests whose grammars are compiled now."""
        for each, refusal in self._grammars.take_ready():
            if refusal is not None:
                self._refuse(each.stream, refusal)
            elif self._enqueue(each.stream, each.leader):
                self._finish_all(each.ends)

    def _refuse(self, stream: int, why: BadRequest | QueueFull) -> None:
        if isinstance(why, QueueFull):
            self._send(QueueRefused(stream, str(why), why.retry_after_s))
        else:
            self._send(AddRefused.of(stream, why))

    def _finish_all(self, ends: dict[int, str]) -> None:
        for stream, reason in ends.items():
            self._finish(stream, reason)

    def _enqueue(self, first: int, leader: Request) -> bool:
        """Add a request like `_put`, unless its prompt's pages are fetched from another engine first."""
        try:
            if self._pages is not None and self._pages.begin(first, leader):
                return True
        except BadRequest as refusal:
            self._refuse(first, refusal)
            return False
        return self._put(first, leader)

    def _put(self, first: int, leader: Request) -> bool:
        """Give the engine a request whose samples are the streams from `first` on.

        Returns False if the request is refused.
        """
        try:
            self._processors.give(leader)
            self._engine.add(leader)
        except (QueueFull, BadRequest) as refusal:
            self._refuse(first, refusal)
            return False
        unsent = [leader]  # shared by all its samples, since these log-probabilities may take megabytes
        for stream, request in enumerate((leader, *leader.followers), first):
            self._requests[stream] = request
            self._stream_of[request.id] = stream
            self._silent[stream] = unsent
        self._send(AddAccepted(first))
        return True

    def _finish(self, stream: int, reason: str) -> None:
        if self._grammars.end(stream, reason) or (self._pages and self._pages.end(stream, reason)):
            return
        request = self._requests.get(stream)
        if request is not None and self._engine.finish(request.id, reason) is not None:
            self._send(Stepped([], [], [], [], [self._end(request)], StepTimes(0, 0, 0, 0, 0)))

    def _send_step(self, step: Step) -> None:
        streams, tokens, logprobs, begun = [], [], [], []
        for index, (row, token) in enumerate(zip(step.owners.tolist(), step.sampled.tokens.tolist())):
            request = self._engine.slots.requests[row]
            stream = self._stream_of.get(request.id)
            if stream is None or token < 0 or request.params.beam_width:
                continue  # the request ended before this step, or its tokens are sent with its end
            if request.finish_reason not in (None, "stop", "length", "error"):
                continue
            if stream in self._silent:
                begun.append(Begun.of(stream, request, self._silent.pop(stream)))
            streams.append(stream)
            tokens.append(token)
            logprobs.append(step.sampled.logprobs.get(index))
        ended = [self._end(request) for request in step.finished if request.id in self._stream_of]
        if not step.sampled.logprobs:
            logprobs = []
        self._send(Stepped(streams, tokens, logprobs, begun, ended, self._times(step)))

    def _times(self, step: Step) -> StepTimes:
        batch, slots = step.batch, self._engine.slots
        starts, rows = batch.starts, batch.slots
        num_prompt = np.maximum(np.minimum(batch.stops, slots.num_prompt[rows]) - starts, 0).sum()
        return StepTimes(
            step.end_s - step.start_s, self._clock.taken(), batch.num_spans, batch.num_tokens, int(num_prompt)
        )

    def _end(self, request: Request) -> SampleEnd:
        stream = self._stream_of.pop(request.id)
        del self._requests[stream]
        self._silent.pop(stream, None)
        admitted_s, first_s, finish_s = request.admitted_s, request.first_token_s, request.finish_s
        return SampleEnd(
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
                BeamHypothesis(
                    each.tokens.tolist(),
                    each.cumulative_logprob,
                    each.score,
                    each.finish_reason,
                    list(each.logprobs),
                )
                for each in request.hypotheses
            ],
            request.is_at_fault,
            request.num_drafted,
            request.num_accepted,
        )

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._beat_s + BEAT_S:
            self._beat_s = now_s
            scheduler = self._engine.scheduler
            gauges = self._usage()
            counted = self._recount(now_s)
            # The recount may be older than the gauges.
            num_shared = min(counted.shared_pages, gauges.held_pages)
            speculation = scheduler.speculation
            self._send(
                Beat(
                    gauges,
                    scheduler.counters,
                    scheduler.held_back,
                    num_shared,
                    counted.wrong_pages,
                    [] if speculation is None else speculation.accepted_by_position,
                    self._grammars.grammars.counters,
                    self._read_experts(now_s),
                    self._read_tier(),
                    self._learned(),
                )
            )

    def _usage(self) -> Usage:
        """Return the engine's usage plus the samples that wait before its queue.

        Requests wait there for a grammar or for another engine's pages.
        """
        scheduler, compiling = self._engine.scheduler, self._grammars.leaders
        found = usage(scheduler, self._facts.page_bytes, self._facts.further_page_bytes)
        num_compiled = sum(1 + len(each.followers) for each in compiling)
        num_fetched, fetched_tokens = (0, 0) if self._pages is None else self._pages.waiting
        return replace(
            found,
            waiting_requests=found.waiting_requests + num_compiled + num_fetched,
            queued_tokens=found.queued_tokens + tokens_not_found(scheduler, compiling) + fetched_tokens,
        )

    def _recount(self, now_s: float) -> Recount:
        """Return the last recount, or a new one as often as recounts take a thousandth of the time."""
        if now_s >= self._recount_s:
            before, self._last_recount = self._last_recount, recount(self._engine.scheduler)
            self._recount_s = time.monotonic() + _RECOUNTS_COST * (time.monotonic() - now_s)
            if self._last_recount.wrong_pages > before.wrong_pages:
                log.error("%d pages have other holders than a recount finds", self._last_recount.wrong_pages)
        return self._last_recount

    def _view(self) -> View:
        slots, scheduler = self._engine.slots, self._engine.scheduler
        rows: list[tuple[int, int, int, int] | None] = [None] * slots.num_slots
        for row in slots.busy.tolist():
            stream = self._stream_of.get(slots.requests[row].id, -1)
            counts = int(slots.num_tokens[row]), int(slots.num_computed[row]), int(slots.num_pages[row])
            rows[row] = (stream, *counts)
        holders = scheduler.pool.holders
        cached = np.zeros(len(holders), dtype=np.uint8)
        cached[scheduler.prefix.pages] = 1
        return View(rows, np.minimum(holders, 255).astype(np.uint8).tobytes(), cached.tobytes())

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode_whole(message))


def _between(since_s: float | None, until_s: float | None) -> float | None:
    return None if since_s is None or until_s is None else max(0.0, until_s - since_s)
