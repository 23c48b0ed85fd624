"""What has a request been answered so far, and what of it has its reader not seen?

Tokens come from the engine as they are made; text goes to the reader as fast as that reads. What lies between
is bounded: a reader that is too far behind is cut off, and slows nobody else.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from continuous_batching.request import Request, TokenLogprobs
from serving.answers.failures import CutOff, Failed, Failure
from serving.engine.messages import Begun, Ended, Found
from serving.text.detokenizer import Detokenizer, TextOptions
from serving.text.tokenizer import Text


@dataclass(slots=True)
class Delta:
    """What is new of one answer. `logprobs` has as many entries as `tokens`, if they were asked for."""

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the token, that ended it

    def extend(self, more: Delta) -> None:
        """Put what comes next behind it."""
        self.text += more.text
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason


@dataclass(slots=True)
class Sample:
    """One sample of a prompt."""

    request: Request
    detokenizer: Detokenizer | None
    num_tokens: int = 0
    last_s: float = 0.0  # when its last token came
    finish_reason: str | None = None
    held: Delta | None = None  # all of it, where samples are ranked when they have ended
    end: Ended | None = None  # what the engine said of its end


class Answer:
    """The samples of one prompt, of which `num_answers` are wanted.

    One reader calls `next`; the server calls the others.
    """

    def __init__(
        self,
        request: Request,
        text: Text | None,
        options: TextOptions,
        *,
        num_answers: int,
        max_unread_tokens: int,
    ) -> None:
        self.request = request
        self.num_answers = num_answers
        self.arrival_s = time.monotonic()
        self.first_stream = -1
        self.num_cached_tokens = 0  # of the prompt, found computed, as far as is known
        self.prompt_logprobs: list[TokenLogprobs] = []  # of its tokens from the second on, if asked for
        requests = [request, *request.followers]
        self.samples = [Sample(each, self._detokenizer(each, text, options)) for each in requests]
        self.failure: Failure | None = None
        self.is_aborted = False  # and the engine was told so
        self._text = text
        self._options = options
        self._max_unread_tokens = max_unread_tokens
        self._ranked = num_answers < len(self.samples)
        self._num_open = len(self.samples)
        self._unread: list[Delta] = []
        self._num_unread = 0
        self._news = asyncio.Event()
        self.failed = asyncio.Event()

    @staticmethod
    def _detokenizer(request: Request, text: Text | None, options: TextOptions) -> Detokenizer | None:
        if text is None or request.params.beam_width:
            return None
        return options.detokenizer(text, request.params)

    @property
    def is_open(self) -> bool:
        """Whether any of its samples goes on."""
        return self._num_open > 0 and self.failure is None

    @property
    def is_told(self) -> bool:
        """Whether all of it was taken by `next`, to its good end."""
        return not self._num_open and not self._unread and self.failure is None

    @property
    def num_tokens(self) -> int:
        """Of all its samples."""
        return sum(each.num_tokens for each in self.samples)

    async def next(self) -> list[Delta]:
        """What is new, at least one; empty when all is told. Raises the Failure that ended it."""
        while not self._unread:
            if self.failure is not None:
                raise self.failure
            if not self._num_open:
                return []
            self._news.clear()
            await self._news.wait()
        unread, self._unread, self._num_unread = self._unread, [], 0
        return unread

    def begin(self, begun: Begun) -> None:
        """The prompt is computed."""
        self.num_cached_tokens = max(self.num_cached_tokens, begun.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or begun.prompt_logprobs

    def push(self, index: int, token: int, logprobs: TokenLogprobs | None, end: Ended | None) -> bool:
        """One more token of a sample, and its end if it has come; whether its text has just ended it."""
        sample = self.samples[index]
        if sample.finish_reason is not None:
            return False  # the engine had begun it before it knew
        sample.num_tokens += 1
        ends = end is not None and end.reason == "stop"
        hidden = ends and not self._options.include_stop_str_in_output
        delta = Delta(index, "", [token], [] if logprobs is None else [logprobs])
        stopped = None
        if sample.detokenizer is not None and not hidden:
            delta.text = sample.detokenizer.push((token,))
            stopped = sample.detokenizer.stopped
        if stopped is not None:
            self._finish(sample, delta, "stop", stopped)
        elif end is not None:
            self._finish_by(sample, delta, end, token if ends else None)
        else:
            self._tell(sample, delta)
        return stopped is not None

    def finish(self, index: int, end: Ended) -> None:
        """A sample ended without another token, or its text has ended it before."""
        sample = self.samples[index]
        sample.end = end
        if sample.finish_reason is None:
            self._finish_by(sample, Delta(index, ""), end, None)

    def fail(self, failure: Failure) -> None:
        """End all of it; what is unread is still told."""
        if self.is_open:
            self.failure = failure
            self._news.set()
            self.failed.set()

    def _finish_by(self, sample: Sample, delta: Delta, end: Ended, stop_token: int | None) -> None:
        sample.end = end
        if end.reason == "error":
            self.fail(Failed(end.error or "the request failed"))
            return
        if end.hypotheses:
            self.num_cached_tokens = end.num_cached_tokens
            self._num_open -= 1
            sample.finish_reason = end.reason
            told = end.hypotheses[: self.num_answers]
            sample.num_tokens = sum(len(found.tokens) for found in told)
            for index, found in enumerate(told):
                self._put(self._hypothesis(index, found))
            return
        if sample.detokenizer is not None:
            delta.text += sample.detokenizer.flush()
        eos = stop_token is not None and stop_token not in sample.request.params.stop_token_ids
        self._finish(sample, delta, end.reason, None if eos else stop_token)

    def _hypothesis(self, index: int, found: Found) -> Delta:
        options, text = self._options, ""
        if self._text is not None:
            text = self._text.decode(
                options.without_end(found.tokens, found.finish_reason),
                skip_special_tokens=options.skip_special_tokens,
                start=options.start,
            )
        asked = self.request.params.logprobs is not None
        return Delta(index, text, found.tokens, found.logprobs if asked else [], found.finish_reason)

    def _finish(self, sample: Sample, delta: Delta, reason: str, stop_reason: str | int | None) -> None:
        sample.finish_reason = delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self._num_open -= 1
        self._tell(sample, delta)
        if self._ranked and not self._num_open:
            held = [each.held for each in self.samples if each.held is not None]
            best = sorted(held, key=lambda each: -sum(entry.logprob for entry in each.logprobs))
            for index, each in enumerate(best[: self.num_answers]):
                each.index = index
                self._put(each)

    def _tell(self, sample: Sample, delta: Delta) -> None:
        if not self._ranked:
            self._put(delta)
        elif sample.held is None:
            sample.held = delta
        else:
            sample.held.extend(delta)

    def _put(self, delta: Delta) -> None:
        self._unread.append(delta)
        self._num_unread += len(delta.tokens)
        self._news.set()
        if self._num_unread > self._max_unread_tokens and self.is_open:
            self.fail(
                CutOff(
                    f"{self._num_unread} tokens were not read; a client may leave {self._max_unread_tokens}"
                    " (server.max_unread_tokens): read faster, or ask for fewer at once",
                    "slow_reader",
                )
            )
