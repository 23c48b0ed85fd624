"""Let many callers in one event loop share one engine.

The engine runs in a process of its own. If that process ends or hangs, every caller who waits for it gets an
error, and another engine is started. Long prompts are tokenized in threads; tokens are decoded to text in the
event loop.

The requests in the server are bounded, and so are the log-probabilities that they ask for. A log-probability
costs about 130 bytes in the engine and as many in the server until its response has been sent, so a body of a
megabyte could ask for gigabytes: `logprobs: 20` for thousands of prompts. The most that a request may ask for
is reserved before the engine receives it, and released when its response has been sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from borders.refusal import BadRequest
from continuous_batching.request import Request
from kv_cache.page_keys import page_keys
from recipes.cluster.cluster import find_cluster
from recipes.fitting import fitted, one_of, with_settings
from recipes.schema.reader import load
from recipes.schema.server_section import ServerSection
from serving.adapters import AdapterPut, ServedAdapters
from serving.answers.answers import AnswerStream
from serving.continuation import Continuation
from serving.engine.messages import (
    Add,
    AddAccepted,
    AddRefused,
    Beat,
    EngineFacts,
    Finish,
    FromEngine,
    Look,
    OrderDone,
    QueueRefused,
    Ready,
    RecordTrace,
    SampleEnd,
    Stepped,
    TraceWritten,
    View,
)
from serving.engine.supervisor import State, Supervisor
from serving.failures import CutOff, EngineEnded, Failure, Overloaded, RequestFailed, ShutDown, Unavailable
from serving.metrics.server_stats import ServerStats
from serving.orders import Orders
from serving.outputs import GrowingOutput, Prompt, RequestOutput, VllmSamplingParams, fields_of
from serving.text.request_fields import NO_DEFAULTS, check_length, is_short, parse_request, text_options
from serving.text.sampling_defaults import sampling_defaults
from serving.text.tokenizer import Text

RETRY_S = 1.0  # the hint to clients where nothing better is known
BODY_S = 1.0  # time for which a request holds its place while its body is still on its way


def prompt_entries(request: Request, num_answers: int) -> int:
    """Return the number of prompt log-probabilities in a response, which `num_answers` of it repeat."""
    asked = request.params.prompt_logprobs
    return 0 if asked is None else request.num_prompt_tokens * (asked + 1) * num_answers


def answer_entries(request: Request, longest: int) -> int:
    """Return the most log-probabilities of a request's answers; no sequence is longer than `longest`."""
    params, num_samples = request.params, 1 + len(request.followers)
    if params.logprobs is None:
        return 0
    return min(params.max_tokens, longest) * (params.logprobs + 1) * max(num_samples, params.beam_width)


class ServerLimits:
    """Counts what is in the server against its limits; `on_refusal` gets the reason for the metrics."""

    def __init__(self, section: ServerSection, on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._max_requests = section.max_requests
        self._most_in_flight = section.max_logprobs_in_flight
        self._most_of_one = min(section.max_logprobs_per_request, section.max_logprobs_in_flight)
        self.num_logprobs = 0  # number of reserved log-probabilities
        self.num_entering = 0  # number of places that requests on their way to the engine hold

    def check_room(self, num_requests: int, num_samples: int) -> None:
        """Raise Overloaded if there is no room for `num_samples` beside `num_requests`.

        Raises BadRequest if there could never be.
        """
        limit = self._max_requests
        takes = f"the server takes {limit} (server.max_requests)"
        if num_samples > limit:
            self._on_refusal("refused")
            raise BadRequest(
                "n",
                f"ask for {num_samples} samples; {takes}",
                value=num_samples,
                limit=limit,
                fix="ask for fewer",
                subject="n and best_of",
            )
        if num_requests + num_samples > limit:
            self._on_refusal("queue_full")
            raise Overloaded(
                f"{num_requests} requests are in, and this asks for {num_samples} more; {takes}: try again"
                " later",
                RETRY_S,
            )

    def reserve(self, requests: Sequence[Request], fields: Mapping[str, Any], longest: int) -> list[int]:
        """Reserve the log-probabilities of the requests of one response, and return the number for each.

        The requests share the given fields. `longest` is the most tokens of prompt and answer. Raises
        BadRequest for too many in one response, and Overloaded for too many beside those already reserved.
        """
        num_answers = 1 if "messages" in fields else fields.get("n") or 1  # those of a chat stand once
        of_prompts = [prompt_entries(each, num_answers) for each in requests]
        of_answers = [answer_entries(each, longest) for each in requests]
        total = sum(of_prompts) + sum(of_answers)
        if total > self._most_of_one:
            self._on_refusal("refused")
            field = "prompt_logprobs" if sum(of_prompts) > sum(of_answers) else _name_of(fields)
            raise BadRequest(
                field,
                f"asks for {total} log-probabilities, of all tokens, prompts and samples; one request may"
                f" ask for {self._most_of_one} (server.max_logprobs_per_request)",
                value=total,
                limit=self._most_of_one,
                fix="set max_tokens, or ask for fewer of each token, or for fewer prompts at a time",
            )
        if total and self.num_logprobs + total > self._most_in_flight:
            self._on_refusal("queue_full")
            raise Overloaded(
                f"{self.num_logprobs} log-probabilities are asked for, and this request asks for {total};"
                f" the server takes {self._most_in_flight} (server.max_logprobs_in_flight): try again later,"
                " or set max_tokens",
                RETRY_S,
            )
        self.num_logprobs += total
        return [prompt + answer for prompt, answer in zip(of_prompts, of_answers)]

    def release(self, answer: AnswerStream) -> None:
        """Release an answer's log-probabilities, which were sent or will never be.

        A second release does nothing.
        """
        self.num_logprobs -= answer.num_reserved_logprobs
        answer.num_reserved_logprobs = 0
        assert self.num_logprobs >= 0, "more is released than was reserved"


class EntryPlace:
    """The room that a request holds from its head until the engine has its samples.

    Without it, all requests that come while one place is free would be read and decoded, and then be refused
    but for one.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self.num_samples = 0

    def take(self, num_samples: int, num_requests: int) -> None:
        """Hold room for so many samples, beside those in the engine; raises Overloaded or BadRequest."""
        self._stop_timer()
        others = num_requests + self._limits.num_entering - self.num_samples
        self._limits.check_room(others, num_samples)
        self._limits.num_entering += num_samples - self.num_samples
        self.num_samples = num_samples

    def leave_after(self, seconds: float) -> None:
        """Give the room back then, unless it is taken again before."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.leave)

    def leave(self) -> None:
        """Give the room back; a second time does nothing."""
        self._stop_timer()
        self._limits.num_entering -= self.num_samples
        self.num_samples = 0

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


PLACE: ContextVar[EntryPlace | None] = ContextVar("PLACE", default=None)  # the request that is handled
IS_OF_BATCH = ContextVar("IS_OF_BATCH", default=False)  # whether that is a line of a batch


def _name_of(fields: Mapping[str, Any]) -> str:
    """Return the field that asks for the log-probabilities of answers."""
    return "top_logprobs" if fields.get("top_logprobs") is not None else "logprobs"


# A field beside those of `parse_request`, stored as `Request.prompt_replica`.
PROMPT_REPLICA = "prompt_replica"


def parted(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Split off the replica that may compute the prompt from the fields of `parse_request`."""
    known = {name: value for name, value in fields.items() if name != PROMPT_REPLICA}
    return known, fields.get(PROMPT_REPLICA, "")


def with_pages(request: Request, facts: EngineFacts, prompt_replica: str) -> Request:
    """Set the keys of the request's pages; hashing them in the engine would delay a step."""
    shared = facts.max_shared_tokens
    if facts.prefix_sharing and (shared is None or request.num_prompt_tokens <= shared):
        request.page_keys = page_keys(request.prompt, facts.page_size, request.cache_salt)
    request.prompt_replica = prompt_replica
    return request


def why_not_resumed(requests: Sequence[Request]) -> str:
    """Return why the answers to one response cannot go on at another engine, or "" if they can."""
    if len(requests) > 1:
        return "it has several prompts"
    (request,) = requests
    if request.followers:
        return "it has several samples (n, best_of)"
    if request.params.beam_width:
        return "it is a beam search"
    return "" if request.params.pooling is None else "it is an embedding"


log = logging.getLogger(__name__)

Value = TypeVar("Value")


async def _all_ended(works: Sequence[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Return the results of works that run at once; raises the first failure, once all have ended.

    Text threads may still work for the others until then, so that the request is not over. One work needs no
    task of its own: a short request then reaches the engine without waiting for others that came with it.
    """
    if len(works) == 1:
        return [await works[0]]
    results = await asyncio.gather(*works, return_exceptions=True)
    found = list[Value]()
    for each in results:
        if isinstance(each, BaseException):
            raise each
        found.append(each)
    return found


Fields = Mapping[str, Any]  # fields that `parse_request` reads, and PROMPT_REPLICA


class AsyncLLM:
    """A model that answers many requests at once; raises ValueError for a recipe that cannot be used.

    A checkpoint's folder stands in place of a recipe, and `settings` have vLLM's names, as with `LLM`.
    `overrides` are written as on the command line: "cache.page_size=32". Call `start` and `close` within the
    same event loop.
    """

    def __init__(
        self,
        recipe: str | Path | None = None,
        *overrides: str,
        model: str | Path | None = None,
        profile: str | None = None,
        stats: ServerStats | None = None,
        **settings: Any,
    ) -> None:
        overrides = with_settings(overrides, settings)
        recipe, overrides = fitted(one_of(recipe, model), overrides, profile)
        self.recipe = load(recipe, overrides, profile)
        self.text = Text.of(self.recipe)
        self.sampling_defaults = sampling_defaults(self.recipe)
        self.stats = stats or ServerStats()
        self.limits = ServerLimits(self.recipe.server, self.stats.rejected)
        chosen = [] if profile is None else ["--profile", profile]
        self._arguments = [str(Path(recipe).resolve()), *overrides, *chosen]
        parallel = self.recipe.parallel
        self.engine = Supervisor(
            *(self._arguments_of, self.recipe.server, self._hear, self._lose_engine),
            leads_others=parallel.ranks > 1 and find_cluster(parallel, os.environ).num_nodes > 1,
        )
        self.stats.is_slow = lambda: self.engine.status == "slow"
        self.stats.silence_limit_s = lambda: self.engine.silence.limit_s
        self.adapters = ServedAdapters(self.recipe.adapters, self.engine.send, self._requests)
        self.orders = Orders(self.recipe, self.engine, self._open_answers, self.abort)
        self.stats.orders = self.orders
        self._threads = ThreadPoolExecutor(self.recipe.server.text_threads, "text")
        # Kept until the engine has sent a stream's end.
        self._streams: dict[int, tuple[AnswerStream, int]] = {}
        self._num_parsing = 0
        self._num_lines_parsing = 0  # those of them that belong to lines of batches
        self._next_stream = 0
        self._looks: list[asyncio.Future[View]] = []
        self._trace: asyncio.Future[TraceWritten] | None = None  # the last trace of steps that was asked for

    def _arguments_of(self, life: int) -> list[str]:
        """Return the worker's arguments; each life of the engine has a recording of its own."""
        record = self.recipe.scheduler.record
        other = [] if record is None or life == 1 else [f"scheduler.record={record}.{life}"]
        return [*self._arguments, *other]

    @property
    def state(self) -> State:
        """The engine's state (see Supervisor)."""
        return self.engine.state

    @property
    def accepts(self) -> bool:
        """Whether requests are accepted: the engine is ready, and no order of an operator refuses them."""
        return self.state == "ready" and not self.orders.why_not

    @property
    def facts(self) -> EngineFacts | None:
        """The engine's facts, while an engine is ready."""
        return self.engine.facts

    @property
    def num_requests(self) -> int:
        """The number of samples in the engine and of requests on their way to it."""
        return len(self._streams) + self._num_parsing

    @property
    def num_client_slots(self) -> int:
        """The number of slots that requests ask for which are no lines of batches, as far as is known."""
        answers = (answer for answer, _ in self._streams.values() if not answer.is_of_batch)
        num_slots = sum(max(1, answer.request.params.beam_width) for answer in answers)
        return num_slots + self._num_parsing - self._num_lines_parsing

    def _requests(self) -> Iterator[Request]:
        return (answer.request for answer, _ in self._streams.values())

    def _open_answers(self) -> list[AnswerStream]:
        answers = {id(answer): answer for answer, _ in self._streams.values() if answer.is_open}
        return [*answers.values()]

    def start(self) -> None:
        """Start the engine; `ready` waits for it."""
        self.engine.start()

    async def ready(self) -> None:
        """Wait for the engine; raises Unavailable if there will be none."""
        await self.engine.ready()

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()
        self._lose(Unavailable("the server is shutting down; send the request again"), "shutdown")
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drain(self, drain_s: float) -> None:
        """Accept no more requests, and abort those that still run after `drain_s`.

        They are aborted at once when this is cancelled.
        """
        self.engine.become("draining")
        try:
            if self.num_requests:
                await asyncio.wait_for(self.engine.until(lambda: not self.num_requests), drain_s)
        except asyncio.TimeoutError:
            log.warning("%d requests are cut off after %g s of draining", self.num_requests, drain_s)
        finally:
            for answer, _ in list(self._streams.values()):
                self.abort(answer, ShutDown())

    def check_ready(self) -> None:
        """Raise Unavailable unless requests are accepted."""
        if self.state != "ready":
            self.stats.rejected(self.state)
            raise Unavailable(self.engine.why_not, self.engine.ready_in_s)
        if why_not := self.orders.why_not:
            self.stats.rejected("asleep")
            raise Unavailable(why_not)

    async def ask(
        self,
        requests: Sequence[Fields],
        *,
        fill: bool = False,
        shorten: bool = False,
        group: str = "",
        owner: str = "",
        seeds: bool = False,
        known: Continuation | None = None,
        takes_defaults: bool = True,
    ) -> list[AnswerStream]:
        """Send requests to the engine, all or none; raises a Failure or BadRequest.

        Apart from their prompts, all have the same fields. With `fill`, an answer without `max_tokens` may be
        as long as model and cache allow; with `shorten`, one with `max_tokens` also ends there. Clients know
        the requests by their `group`, and only `owner` may find them. A caller that has read an answer, or
        stops reading it, calls `limits.release`. With `seeds`, a request without a seed is given one here, so
        that it is known. An answer that is `known` in part, whose request is alone, goes on from there. With
        `takes_defaults`, the checkpoint's own defaults count where the fields leave something out.
        """
        self.check_ready()
        facts, alone = self.facts, len(requests) == 1
        assert facts is not None, "ready without facts"
        assert alone or known is None, "several prompts have no answer that could go on"
        place = PLACE.get() or EntryPlace(self.limits)
        entered = PLACE.set(place)
        parse = partial(self._parse, fill=fill, shorten=shorten, seeds=seeds, known=known)
        try:
            place.take(len(requests), len(self._streams))
            works = [
                self.apart(
                    partial(parse, each, facts, takes_defaults=takes_defaults),
                    at_once=alone and is_short(each) and known is None,
                )
                for each in requests
            ]
            answers = await _all_ended(works)
            self.check_ready()
            parsed = [each.request for each in answers]
            for each in parsed:
                self.adapters.check(each)
            place.take(sum(1 + len(each.followers) for each in parsed), len(self._streams))
            reserved = self.limits.reserve(parsed, requests[0], facts.max_tokens)
            for answer, num_logprobs in zip(answers, reserved):
                answer.group, answer.owner = group or answer.group, owner
                answer.num_reserved_logprobs = num_logprobs
            self._send_all(answers)
        finally:
            place.leave()
            PLACE.reset(entered)
        return answers

    def enter(self) -> EntryPlace:
        """Hold a place for the request that this task handles, whose body is not read; raises Overloaded."""
        place = EntryPlace(self.limits)
        place.take(1, len(self._streams))
        place.leave_after(BODY_S)
        PLACE.set(place)
        return place

    def _send_all(self, answers: Sequence[AnswerStream]) -> None:
        """Send the requests of one response; where one cannot be sent, nothing of them stays."""
        sent = list[AnswerStream]()
        try:
            for answer in answers:
                self._send(answer)
                sent.append(answer)
        except BaseException:
            for answer in answers:
                self.limits.release(answer)
            for answer in sent:
                self.abort(answer, RequestFailed("another prompt of the request could not be sent"))
            raise

    def _send(self, answer: AnswerStream) -> None:
        first, num_samples = self._next_stream, len(answer.samples)
        age_s = time.monotonic() - answer.arrival_s
        # What cannot be sent must have no streams: nobody would end them.
        self.engine.send(Add.of(first, answer.request, age_s))
        answer.weights = self.orders.of_answers
        answer.is_of_batch = IS_OF_BATCH.get()
        answer.first_stream = first
        self._next_stream += num_samples
        self._streams |= {first + index: (answer, index) for index in range(num_samples)}
        self.stats.added(answer)

    def _parse(
        self,
        fields: Fields,
        facts: EngineFacts,
        *,
        fill: bool,
        shorten: bool,
        seeds: bool = False,
        known: Continuation | None = None,
        takes_defaults: bool = True,
    ) -> AnswerStream:
        """Return the answer to a request, which has the keys of its prompt's pages."""
        most, (asked, prompt_replica) = facts.max_tokens, parted(fields)
        check_length(fields, most, self.text)
        longest, adapters = most if fill or shorten else None, self.adapters
        request = parse_request(
            asked,
            self.text,
            longest=longest,
            shorten=shorten,
            limit=most,
            adapters=adapters,
            defaults=self.sampling_defaults if takes_defaults else NO_DEFAULTS,
            tokens=None if known is None else known.prompt,
        )
        if known is not None:
            params = replace(request.params, seed=known.begun.seed, max_tokens=known.begun.max_tokens)
            request = replace(request, params=params, known=known.known)
        elif seeds and request.params.seed is None and not why_not_resumed([request]):
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        answer = AnswerStream(
            with_pages(request, facts, prompt_replica),
            self.text,
            text_options(fields, self.text),
            num_answers=fields.get("n") or 1,
            max_unread_tokens=self.recipe.server.max_unread_tokens,
        )
        if known is not None:
            answer.replay(known)
        return answer

    async def generate(
        self, prompt: Prompt, sampling_params: VllmSamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answers so far whenever they grow; a reader that stops early aborts the request.

        Raises a Failure, and BadRequest for a request that cannot be served.
        """
        params, given = sampling_params, fields_of(prompt)
        fields = params.asked() | given | {"id": request_id}
        fill = params.max_tokens is None
        (answer,) = await self.ask([fields], fill=fill, shorten=True, takes_defaults=False)
        output = GrowingOutput(
            answer.request,
            self.text,
            prompt=given.get("prompt"),
            with_logprobs=params.shows_logprobs,
        )
        try:
            while deltas := await answer.next():
                output.take(deltas)
                yield output.output(
                    answer.prompt_logprobs,
                    finished=answer.is_read,
                    num_cached_tokens=answer.num_cached_tokens,
                )
        finally:
            self.limits.release(answer)
            if answer.is_open:
                self.abort(answer)

    async def apart(self, work: Callable[[], Value], *, at_once: bool = False) -> Value:
        """Return the result of work in a thread, or here if `at_once`; raises Overloaded or BadRequest."""
        held = PLACE.get()
        place = EntryPlace(self.limits) if held is None or not held.num_samples else None
        if place is not None:
            place.take(1, len(self._streams))
        self._num_parsing += 1
        self._num_lines_parsing += IS_OF_BATCH.get()
        try:
            if at_once:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RecursionError as error:
            self.stats.rejected("refused")
            raise BadRequest(None, "a request must not be nested so deeply", fix="make it flatter") from error
        except ValueError as error:
            self.stats.rejected("refused")
            raise error if isinstance(error, BadRequest) else BadRequest(None, str(error)) from error
        finally:
            if place is not None:
                place.leave()
            self._num_parsing -= 1
            self._num_lines_parsing -= IS_OF_BATCH.get()
            self._notify_if_empty()

    def abort(self, answer: AnswerStream, failure: Failure | None = None) -> None:
        """End an answer whose rest nobody waits for."""
        answer.fail(failure or CutOff("the request was aborted", "disconnect"))
        if not answer.is_aborted:
            answer.is_aborted = True
            if isinstance(answer.failure, CutOff):
                self.stats.aborted(answer, answer.failure.cause)
            for stream, end in enumerate(answer.ends, answer.first_stream):
                if end is None:
                    self.engine.send(Finish(stream, "abort"))

    def find(self, group: str, owner: str = "") -> list[AnswerStream]:
        """Return this owner's open answers to the request whose id the client knows as `group`."""
        return [each for each in self._open_answers() if (each.group, each.owner) == (group, owner)]

    def answer_of(self, stream: int) -> AnswerStream | None:
        """Return the answer that a stream belongs to, while the engine works on it."""
        found = self._streams.get(stream)
        return None if found is None else found[0]

    async def look(self) -> View:
        """Return the present state of the engine's slots and pages; raises Unavailable without an engine."""
        if self.facts is None:
            raise Unavailable(self.engine.why_not, self.engine.ready_in_s)
        future: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        self._looks.append(future)
        self.engine.send(Look())
        return await future

    def start_profile(self, num_steps: int) -> None:
        """Have the engine record a trace of the next so many steps.

        Raises BadRequest without `server.profile` or while another is recorded, and Unavailable without an
        engine.
        """
        if self.recipe.server.profile is None:
            raise BadRequest(None, "the recipe names no folder for traces", fix="set server.profile")
        self.check_ready()
        if self._trace is not None and not self._trace.done():
            raise BadRequest(None, "a trace is being recorded", fix="end it by POST /stop_profile")
        self._trace = asyncio.get_running_loop().create_future()
        self.engine.send(RecordTrace(num_steps))

    async def stop_profile(self) -> TraceWritten:
        """Return the trace that was asked for last; one that is being recorded ends now.

        Raises BadRequest where none was asked for, and Unavailable if the engine was lost with it.
        """
        if self._trace is None:
            raise BadRequest(None, "no trace was begun", fix="begin one by POST /start_profile")
        if not self._trace.done():
            self.engine.send(RecordTrace(0))
        return await asyncio.shield(self._trace)

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Stepped():
                self._step(message)
            case Ready(facts):
                self.stats.ready(facts, self.engine.start_s, self.engine.starting.stages_s)
                self.adapters.begin(facts.adapters)
                self.orders.begin()
            case OrderDone():
                self.orders.hear(message)
            case AdapterPut():
                self.adapters.hear(message)
            case Beat():
                self.stats.beat(message)
            case AddAccepted(stream):
                answer, _ = self._streams[stream]
                answer.accept()
                self.stats.accepted(answer)
            case AddRefused(stream):
                self._refuse(stream, "refused", message.error())
            case QueueRefused(stream, reason, retry_after_s):
                self._refuse(stream, "queue_full", Overloaded(reason, retry_after_s))
            case TraceWritten(path, error):
                log.info("%s", f"a trace of steps: {path}" if path else f"no trace of steps: {error}")
                if self._trace is not None and not self._trace.done():
                    self._trace.set_result(message)
            case View():
                look = self._looks.pop(0)
                if not look.done():
                    look.set_result(message)

    def _step(self, message: Stepped) -> None:
        """Give each token to the answer that it belongs to."""
        now_s = time.monotonic()
        ends = message.ends_at()
        logprobs: Sequence[Any] = message.logprobs or [None] * len(message.tokens)
        for begun in message.begun:
            answer, _ = self._streams[begun.stream]
            answer.begin(begun)
            answer.weights = self.orders.of_answers
        for at, (stream, token, entry) in enumerate(zip(message.streams, message.tokens, logprobs)):
            answer, index = self._streams[stream]
            sample = answer.samples[index]
            if sample.finish_reason is not None:
                continue  # the token was computed before a stop string was found to have ended the sample
            if sample.num_tokens:
                self.stats.next_token(now_s - answer.last_token_s[index])
            else:
                self.stats.first_token(answer, now_s - answer.arrival_s)
            answer.last_token_s[index] = now_s
            if answer.take(index, token, entry, ends.get(at)):
                self.engine.send(Finish(stream, "stop"))
            if answer.failure is not None:
                self.abort(answer)
        for end in message.ended:
            self._end(end, now_s)
        self.stats.stepped(message.times)

    def _end(self, end: SampleEnd, now_s: float) -> None:
        answer, index = self._streams.pop(end.stream)
        answer.weights = self.orders.of_answers  # a beam search ends without having begun
        answer.finish(index, end)
        self.stats.ended(answer, index, end, now_s - answer.arrival_s)
        if answer.failure is not None:  # the answer's other samples are of no use
            self.abort(answer)
        self._notify_if_empty()

    def _refuse(self, stream: int, reason: str, failure: Failure | BadRequest) -> None:
        """Handle the engine's refusal of a request."""
        answer, _ = self._streams[stream]
        for index in range(len(answer.samples)):
            del self._streams[stream + index]
        self._notify_if_empty()
        self.stats.refused(answer, reason)
        answer.fail(failure)

    def _notify_if_empty(self) -> None:
        if not self.num_requests:
            self.engine.notify()  # `drain` waits for this

    def _lose_engine(self, reason: str) -> None:
        self.stats.lost(reason)
        self._lose(EngineEnded(f"{reason}; send the request again", self.engine.ready_in_s), "engine_lost")

    def _lose(self, failure: Unavailable, cause: str) -> None:
        """End all open requests, since no engine works on them any more."""
        for answer, _ in self._streams.values():
            if answer.is_open:
                self.stats.aborted(answer, cause)
            answer.fail(copy(failure))  # each is raised, and gets a traceback of its own
        self._streams.clear()
        self.adapters.lose(failure)
        self.orders.lose(copy(failure))
        for look in (each for each in self._looks if not each.done()):
            look.set_exception(copy(failure))
        self._looks.clear()
        if self._trace is not None and not self._trace.done():
            self._trace.set_exception(failure)
            self._trace.exception()  # nobody may be waiting for it
        self.engine.notify()
