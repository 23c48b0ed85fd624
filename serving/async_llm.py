"""How do many callers in an event loop share one engine?

The engine runs in a process of its own. If that ends or hangs, those who wait are told, and another is
started. Prompts become tokens in threads, but for short ones; tokens become text in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from continuous_batching.request import Request
from recipes.schema.reader import load
from serving.answers.answers import Answer
from serving.answers.failures import BadRequest, CutOff, Failure, Overloaded, ShutDown, Unavailable
from serving.answers.outputs import Prompt, RequestOutput, SamplingParams, fields_of, growing
from serving.engine.messages import Add, Beat, Ended, Facts, Finish, FromEngine, Look, Refused, Stepped, View
from serving.engine.supervisor import State, Supervisor
from serving.metrics.tally import Tally
from serving.text.lengths import fill_up, is_short, too_long
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text

log = logging.getLogger(__name__)

Value = TypeVar("Value")
_RETRY_S = 1.0  # hint before the pace of answers is known


class AsyncLLM:
    """A model that answers many at once. Raises ValueError for a recipe that cannot be used.

    `start` it within an event loop, and `close` it there.
    """

    def __init__(
        self,
        recipe: str | Path,
        overrides: Sequence[str] = (),
        profile: str | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.recipe = load(recipe, overrides, profile)
        self.text = Text.load(self.recipe.model.path) if self.recipe.model.path else None
        self.last_beat: Beat | None = None
        self.tally = tally or Tally()
        chosen = [] if profile is None else ["--profile", profile]
        self._arguments = [str(Path(recipe).resolve()), *overrides, *chosen]
        self.engine = Supervisor(self._arguments_of, self.recipe.server, self._hear, self._lose, self.tally)
        self._threads = ThreadPoolExecutor(self.recipe.server.text_threads, "text")
        self._streams: dict[int, tuple[Answer, int]] = {}  # whose end the engine has not told
        self._num_parsing = 0
        self._next_stream = 0
        self._looks: list[asyncio.Future[View]] = []

    def _arguments_of(self, life: int) -> list[str]:
        """The worker's; a recording is of one life, and the next one's stands beside it."""
        record = self.recipe.scheduler.record
        beside = [] if record is None or life == 1 else [f"scheduler.record={record}.{life}"]
        return [*self._arguments, *beside]

    @property
    def state(self) -> State:
        """As the supervisor's."""
        return self.engine.state

    @property
    def facts(self) -> Facts | None:
        """Of the engine, while there is one."""
        return self.engine.facts

    @property
    def num_requests(self) -> int:
        """Samples in the engine, and requests on their way to it."""
        return len(self._streams) + self._num_parsing

    def start(self) -> None:
        """Start the engine, which is ready later."""
        self.engine.start()

    async def ready(self) -> None:
        """Wait for the engine; raises Unavailable if there will be none."""
        await self.engine.ready()

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()
        self._lose("the server is shutting down", "shutdown")
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drain(self, drain_s: float) -> None:
        """Take no more; those that do not end within the time, or until this is cancelled, are cut off."""
        self.engine.become("draining")
        try:
            if self.num_requests:
                await asyncio.wait_for(self.engine.until(lambda: not self.num_requests), drain_s)
        except asyncio.TimeoutError:
            log.warning("%d requests are cut off after %g s of draining", self.num_requests, drain_s)
        finally:
            for answer, _ in list(self._streams.values()):
                self.abort(answer, ShutDown())

    async def ask(self, fields: Mapping[str, Any], *, fill: bool = False, alone: bool = True) -> Answer:
        """Send a request to the engine, its fields as `parse_request` takes them; raises a Failure. With
        `fill`, its answer may be as long as model and cache allow; unless `alone`, others come with it.
        """
        self.engine.check_ready()
        if longer := too_long(fields, self.facts, self.text):
            self.tally.rejected("refused")
            raise BadRequest(longer)
        at_once = alone and is_short(fields)
        request = await self.apart(partial(parse_request, fields, self.text), at_once=at_once)
        self.engine.check_ready()
        samples = [request, *request.followers]
        self._check_room(len(samples))
        if fill:
            fill_up(samples, self.facts)
        answer = Answer(
            request,
            self.text,
            text_options(fields),
            num_answers=fields.get("n") or 1,
            max_unread_tokens=self.recipe.server.max_unread_tokens,
        )
        answer.first_stream = self._next_stream
        self._next_stream += len(samples)
        self._streams |= {answer.first_stream + index: (answer, index) for index in range(len(samples))}
        self.engine.send(
            Add(
                stream=answer.first_stream,
                ids=[each.id for each in samples],
                prompt=request.prompt.tobytes(),
                samples=[each.params for each in samples],
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
                timeout_s=request.timeout_s,
                age_s=time.monotonic() - answer.arrival_s,
            )
        )
        self.tally.added(answer)
        return answer

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """What a prompt is answered so far, each time that there is more; who stops listening ends it.

        Raises a Failure, and ValueError for what is no prompt.
        """
        params, given = sampling_params, fields_of(prompt)
        fields = params.asked() | given | {"id": request_id}
        answer = await self.ask(fields, fill=params.max_tokens is None)
        shown = params.logprobs is not None
        try:
            async for each in growing(answer, self.text, prompt=given.get("prompt"), with_logprobs=shown):
                yield each
        finally:
            if answer.is_open:
                self.abort(answer)

    async def apart(self, work: Callable[[], Value], *, at_once: bool = False) -> Value:
        """Done in a thread, unless `at_once`; raises Overloaded, and BadRequest for a ValueError."""
        self._check_room(1)
        self._num_parsing += 1
        try:
            if at_once:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except ValueError as error:
            self.tally.rejected("refused")
            raise BadRequest(str(error)) from error
        finally:
            self._num_parsing -= 1
            self._tell_if_empty()

    def abort(self, answer: Answer, failure: Failure | None = None) -> None:
        """Nobody waits for the rest of it."""
        answer.fail(failure or CutOff("the request was aborted", "disconnect"))
        if not answer.is_aborted:
            answer.is_aborted = True
            if isinstance(answer.failure, CutOff):
                self.tally.aborted(answer, answer.failure.cause)
            for stream, sample in enumerate(answer.samples, answer.first_stream):
                if sample.end is None:
                    self.engine.send(Finish(stream, "abort"))

    def find(self, request_id: str) -> list[Answer]:
        """The open answers to a request, by the id that its sender was told: with no prompt's number."""
        answers = {id(answer): answer for answer, _ in self._streams.values() if answer.is_open}.values()
        return [each for each in answers if "-".join(each.request.id.split("-")[:2]) == request_id]

    def request_of(self, stream: int) -> Request | None:
        """The request that a stream is of, while the engine is at it."""
        found = self._streams.get(stream)
        return None if found is None else found[0].samples[found[1]].request

    async def look(self) -> View:
        """What lies where in the engine; raises Unavailable without one."""
        if self.facts is None:
            raise Unavailable(self.engine.why_not)
        future: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        self._looks.append(future)
        self.engine.send(Look())
        return await future

    def _check_room(self, num_samples: int) -> None:
        """Raise Overloaded if so many more cannot come in now, BadRequest if they never could."""
        limit = self.recipe.server.max_requests
        takes = f"the server takes {limit} (server.max_requests)"
        if num_samples > limit:
            self.tally.rejected("refused")
            raise BadRequest(f"n and best_of ask for {num_samples} samples; {takes}: ask for fewer")
        if self.num_requests + num_samples > limit:
            self.tally.rejected("queue_full")
            raise Overloaded(f"{self.num_requests} requests are in; {takes}: try again later", _RETRY_S)

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Stepped():
                self._step(message)
            case Beat():
                self.last_beat = message
                self.tally.beat(message)
            case Refused(stream, reason, retry_after_s):
                answer = self._forget(stream)
                full = retry_after_s is not None
                self.tally.refused(answer, "queue_full" if full else "refused")
                answer.fail(Overloaded(reason, retry_after_s) if full else BadRequest(reason))
            case View():
                look = self._looks.pop(0)
                if not look.done():
                    look.set_result(message)

    def _step(self, message: Stepped) -> None:
        """Hand each token to the answer that it is of."""
        now_s = time.monotonic()
        ends = {end.stream: end for end in message.ended}
        logprobs: Sequence[Any] = message.logprobs or [None] * len(message.tokens)
        for begun in message.begun:
            self._streams[begun.stream][0].begin(begun)
        for stream, token, entry in zip(message.streams, message.tokens, logprobs):
            answer, index = self._streams[stream]
            sample = answer.samples[index]
            if sample.num_tokens:
                self.tally.next_token(answer, index, now_s - sample.last_s)
            else:
                self.tally.first_token(answer, index, now_s - answer.arrival_s)
            sample.last_s = now_s
            if answer.push(index, token, entry, ends.get(stream)):
                self.engine.send(Finish(stream, "stop"))
            if answer.failure is not None:
                self.abort(answer)
        for end in message.ended:
            self._end(end, now_s)
        self.tally.stepped(message.times)

    def _end(self, end: Ended, now_s: float) -> None:
        answer, index = self._streams.pop(end.stream)
        answer.finish(index, end)
        self.tally.ended(answer, index, end, now_s - answer.arrival_s)
        if answer.failure is not None:  # its other samples are of no use
            self.abort(answer)
        self._tell_if_empty()

    def _forget(self, stream: int) -> Answer:
        """A request's streams are no more."""
        answer, _ = self._streams[stream]
        for index in range(len(answer.samples)):
            del self._streams[stream + index]
        self._tell_if_empty()
        return answer

    def _tell_if_empty(self) -> None:
        if not self.num_requests:
            self.engine.notify()  # of `drain`, which waits for it

    def _lose(self, reason: str, cause: str = "engine_lost") -> None:
        """No engine works at what is asked any more."""
        failure = Unavailable(f"{reason}; send the request again", _RETRY_S)
        for answer, _ in self._streams.values():
            if answer.is_open:
                self.tally.aborted(answer, cause)
            answer.fail(failure)
        self._streams.clear()
        for look in (each for each in self._looks if not each.done()):
            look.set_exception(failure)
        self._looks.clear()
        self.engine.notify()
