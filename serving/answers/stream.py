"""What of a request's answers has its reader not seen yet?

Tokens come from the engine as they are made; text goes to the reader as fast as that reads. What lies between
is bounded: a reader that is too far behind is cut off, and slows down nobody else.
"""

from __future__ import annotations

import asyncio
import time

from continuous_batching.refusal import BadRequest
from continuous_batching.request import Request, TokenLogprobs
from serving.answers.answers import AnswerDelta, SampleAnswers
from serving.engine.messages import Begun, SampleEnd
from serving.failures import CutOff, Failure, RequestFailed
from serving.text.tokenizer import Text, TextOptions


class AnswerStream(SampleAnswers):
    """The answers to one prompt, from the engine to one reader.

    The reader calls `next`, the server the other methods. `group` is the id that the client knows the request
    by, which the prompts of one HTTP request have in common.
    """

    def __init__(
        self,
        request: Request,
        text: Text | None,
        options: TextOptions,
        *,
        num_answers: int,
        max_unread_tokens: int,
        group: str = "",
    ) -> None:
        super().__init__(request, text, options, num_answers)
        self.request = request
        self.group = group or request.id
        self.is_chat = options.start
        self.arrival_s = time.monotonic()
        self.first_stream = -1
        self.last_token_s = [0.0] * len(self.samples)  # when the last token of each sample came
        self.ends: list[SampleEnd | None] = [None] * len(self.samples)  # what the engine said of their ends
        self.num_cached_tokens = 0  # of the prompt, found computed, as far as is known
        self.prompt_logprobs: list[TokenLogprobs] = []  # of its tokens from the second on, if asked for
        self.failure: Failure | BadRequest | None = None
        self.is_aborted = False  # and the engine knows it
        self.failed = asyncio.Event()
        self._max_unread_tokens = max_unread_tokens
        self._unread: list[AnswerDelta] = []
        self._num_unread = 0
        self._news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether any of its samples goes on."""
        return self.num_open > 0 and self.failure is None

    @property
    def is_read(self) -> bool:
        """Whether `next` has returned all of it, to its regular end."""
        return not self.num_open and not self._unread and self.failure is None

    async def next(self) -> list[AnswerDelta]:
        """What is new, at least one; empty when all is read. Raises the failure that ended it."""
        while not self._unread:
            if self.failure is not None:
                raise self.failure
            if not self.num_open:
                return []
            self._news.clear()
            await self._news.wait()
        unread, self._unread, self._num_unread = self._unread, [], 0
        return unread

    def begin(self, begun: Begun) -> None:
        """The prompt is computed."""
        self.num_cached_tokens = max(self.num_cached_tokens, begun.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or begun.prompt_logprobs

    def take(self, index: int, token: int, logprobs: TokenLogprobs | None, end: SampleEnd | None) -> bool:
        """One more token of a sample, and its end if it has come; whether its text has just ended it."""
        if self.samples[index].finish_reason is not None:
            return False
        reason = None if end is None else end.reason
        if reason == "error":  # `finish` follows
            return False
        self._put(self.push(index, (token,), () if logprobs is None else (logprobs,), reason))
        return reason is None and self.samples[index].finish_reason is not None

    def finish(self, index: int, end: SampleEnd) -> None:
        """The engine has ended a sample."""
        self.ends[index] = end
        if self.samples[index].finish_reason is not None:
            return
        if end.reason == "error":
            self.fail(RequestFailed(end.error or "the request failed"))
            return
        if end.hypotheses:
            self.num_cached_tokens = end.num_cached_tokens
        self._put(self.end(index, end.reason, end.hypotheses))

    def fail(self, failure: Failure | BadRequest) -> None:
        """End all of it; what is unread can still be read."""
        if self.is_open:
            self.failure = failure
            self._news.set()
            self.failed.set()

    def _put(self, deltas: list[AnswerDelta]) -> None:
        if not deltas:
            return
        self._unread += deltas
        self._num_unread += sum(len(each.tokens) for each in deltas)
        self._news.set()
        if self._num_unread > self._max_unread_tokens and self.is_open:
            self.fail(
                CutOff(
                    f"{self._num_unread} tokens were not read; a client may leave {self._max_unread_tokens}"
                    " unread (server.max_unread_tokens): read faster, or ask for fewer at once",
                    "slow_reader",
                )
            )
