"""Turn the sampled tokens of one prompt into answers, and keep what their reader has not read yet.

Tokens become text, a stop string ends a sample, the best of several samples are chosen, and the hypotheses of
a beam search become answers. The same code serves requests that this process computes (jobs.py) and requests
whose tokens arrive from an engine's process. A bounded stream lies between such an engine and a reader: a
reader that is too far behind is cut off, and slows down nobody else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from borders.refusal import BadRequest
from continuous_batching.request import Hypothesis, Request, TokenLogprobs, Vector
from serving.continuation import Continuation
from serving.engine.messages import BeamHypothesis, Begun, SampleEnd
from serving.failures import CutOff, Failure, RequestFailed
from serving.fingerprint import ServedWeights
from serving.text.tokenizer import Detokenizer, Text, TextOptions

_NO_CHANCE = -9999.0  # what JSON holds for a log-probability that is minus infinity or not a number
Found = Hypothesis | BeamHypothesis  # found in this process, or in an engine's process


@dataclass(slots=True)
class AnswerDelta:
    """The new part of one answer.

    `logprobs` has as many entries as `tokens`, or none if they were not asked for.
    """

    index: int  # index of the answer among the prompt's answers
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token, that ended it
    sample: int = 0  # index of the sample that the answer comes from
    hypothesis: Found | None = None  # the beam-search hypothesis that the answer is, if any

    def extend(self, more: AnswerDelta) -> None:
        """Append the part that follows this one."""
        text, self.text = self.text, ""  # a text that nothing else refers to grows in place, without a copy
        text += more.text
        self.text = text
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the known log-probabilities of all tokens."""
        if self.hypothesis is not None:
            return self.hypothesis.cumulative_logprob
        return sum(each.logprob for each in self.logprobs)


@dataclass(slots=True)
class SampleProgress:
    """The state of one sample of a prompt."""

    request: Request
    detokenizer: Detokenizer | None  # None: the model has no tokenizer, or it is a beam search
    num_tokens: int = 0
    finish_reason: str | None = None
    held: AnswerDelta | None = None  # the whole answer so far, if samples are ranked once all have ended


def collect(known: dict[int, AnswerDelta], deltas: Iterable[tuple[int, AnswerDelta]]) -> None:
    """Merge new parts of answers into the known answers, by the index that each comes with."""
    for index, delta in deltas:
        if index in known:
            known[index].extend(delta)
        else:
            known[index] = delta


class UnstreamedAnswer:
    """The parts of one answer that is written whole, which `parse` reads.

    They are parsed together at the end, which takes less time, unless they are `told_apart`: each is then
    parsed as it comes, since what it says could not be told once it is joined to others.
    """

    def __init__(self, parse: Callable[[AnswerDelta], Iterable[object]], *, told_apart: bool) -> None:
        self._parse, self._told_apart = parse, told_apart
        self._taken: dict[int, AnswerDelta] = {}  # what is not parsed yet
        self._last = AnswerDelta(0, "")

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take new parts of the answer."""
        for each in deltas:
            collect(self._taken, [each])
            if self._told_apart:
                self.parsed()

    def parsed(self) -> AnswerDelta:
        """Parse what was taken, and return the last that was parsed."""
        for delta in self._taken.values():
            deque(self._parse(delta), maxlen=0)
            self._last = delta
        self._taken.clear()
        return self._last


class SampleAnswers:
    """The samples of one prompt, of which `num_answers` become answers.

    If all samples are wanted, each is an answer as it grows. If fewer are wanted, the answers are the samples
    with the highest log-probability per token once all have ended; the earlier of two equal samples is
    preferred. A sample that ended before it was whole is chosen only if no whole one is left, one without
    tokens only after those, and a failed sample last.
    """

    def __init__(self, request: Request, text: Text | None, options: TextOptions, num_answers: int) -> None:
        self.samples = [
            SampleProgress(each, _detokenizer(each, text, options)) for each in (request, *request.followers)
        ]
        self.num_answers = num_answers
        self.num_open = len(self.samples)
        self._text = text
        self._options = options
        self._is_ranked = num_answers < len(self.samples)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples."""
        return sum([each.num_tokens for each in self.samples])

    def push(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], reason: str | None
    ) -> list[AnswerDelta]:
        """Add tokens to a sample and return the new parts of answers.

        `reason` says why the last token ended the sample; None: it did not.

        A stop string in the text may also end the sample here: its `finish_reason` is then "stop" although no
        reason was given.
        """
        sample = self.samples[index]
        if sample.finish_reason is not None:
            return []  # the engine had begun this token before it was known that the sample ended
        sample.num_tokens += len(tokens)
        delta = AnswerDelta(index, "", list(tokens), list(logprobs), sample=index)
        if sample.detokenizer is not None:
            delta.text = sample.detokenizer.push(self._options.without_end(tokens, reason))
            if sample.detokenizer.stopped is not None:
                return self._finish(sample, delta, "stop", sample.detokenizer.stopped)
        if reason is None:
            return self._grow(sample, delta)
        ended_by = tokens[-1] if reason == "stop" else None
        params = sample.request.params
        # The tokenizer's own end is looked for first, as in vLLM, whether or not it was asked for, too. Any
        # other end is a stop token: one that was asked for, or a further one of the model's configuration
        own = () if self._text is None or params.ignore_eos else self._text.eos_token_ids
        return self._finish(sample, delta, reason, None if ended_by in own else ended_by)

    def end(self, index: int, reason: str, hypotheses: Sequence[Found] = ()) -> list[AnswerDelta]:
        """End a sample without another token, and return the new parts of answers.

        The answers of a beam search that ends before it is complete are all empty.
        """
        sample = self.samples[index]
        if sample.finish_reason is not None:
            return []
        if not hypotheses and not sample.request.params.beam_width:
            return self._finish(sample, AnswerDelta(index, "", sample=index), reason, None)
        sample.finish_reason = reason
        self.num_open -= 1
        answers = [self._hypothesis(at, each) for at, each in enumerate(hypotheses[: self.num_answers])]
        answers = answers or [AnswerDelta(at, "", finish_reason=reason) for at in range(self.num_answers)]
        sample.num_tokens = sum(len(each.tokens) for each in answers)
        return answers

    def _hypothesis(self, index: int, found: Found) -> AnswerDelta:
        options, text, tokens = self._options, "", np.asarray(found.tokens).tolist()
        if self._text is not None:
            text = self._text.decode(
                options.without_end(tokens, found.finish_reason),
                skip_special_tokens=options.skip_special_tokens,
                start=options.start,
                marks=options.marks,
            )
        return AnswerDelta(index, text, tokens, list(found.logprobs), found.finish_reason, hypothesis=found)

    def _finish(
        self, sample: SampleProgress, delta: AnswerDelta, reason: str, stop_reason: str | int | None
    ) -> list[AnswerDelta]:
        if sample.detokenizer is not None:
            delta.text += sample.detokenizer.flush()
        sample.finish_reason = delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self.num_open -= 1
        return self._grow(sample, delta)

    def _grow(self, sample: SampleProgress, delta: AnswerDelta) -> list[AnswerDelta]:
        if not self._is_ranked:
            return [delta]
        if sample.held is None:
            sample.held = delta
        else:
            sample.held.extend(delta)
        if self.num_open:
            return []
        held = [each.held for each in self.samples if each.held is not None]
        best = sorted(held, key=_rank)[: self.num_answers]
        for index, each in enumerate(best):
            each.index = index
        return best


class AnswerStream(SampleAnswers):
    """The answers to one prompt, on their way from the engine to one reader.

    The reader calls `next`; the server calls the other methods. `group` is the id by which the client knows
    the request, shared by all prompts of one HTTP request. Only `owner` may see the request and end it.
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
        owner: str = "",
    ) -> None:
        super().__init__(request, text, options, num_answers)
        self.request = request
        self.group = group or request.id
        self.owner = owner
        self.is_chat, self.num_tools = options.is_chat, options.num_tools
        self.arrival_s = time.monotonic()
        self.created_s = int(time.time())
        self.num_resumed = 0  # how often its engine was lost, and it went on at another
        self.replayed: list[AnswerDelta] = []  # the parts that were answered before it came here
        self.first_stream = -1
        self.last_token_s = [0.0] * len(self.samples)  # when the last token of each sample came
        # What the engine said when each sample ended.
        self.ends: list[SampleEnd | None] = [None] * len(self.samples)
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache, as far as is known
        # Entries of the prompt's tokens from the second on, if asked for.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding: Vector | None = None  # the embedding of the prompt, if asked for
        self.weights: ServedWeights | None = None  # those that compute it, where they can change
        # Entries reserved from the server's limit until the response has been sent.
        self.num_reserved_logprobs = 0
        self.failure: Failure | BadRequest | None = None
        self.is_aborted = False  # the request was aborted, and the engine knows it
        self.failed = asyncio.Event()
        self.is_of_batch = False  # it answers a line of a batch
        self.is_accepted = False  # the request is, or was, in the engine's queue
        self.decided = asyncio.Event()  # set once it is accepted, or has failed before
        self._most_unread_tokens = num_answers * max_unread_tokens
        self._unread: list[AnswerDelta] = []
        self._num_unread = 0
        self._reader: asyncio.Future[None] | None = None  # done once there is news for who waits in `next`

    @property
    def weights_usage(self) -> dict[str, str]:
        """The field of `usage` that says which weights computed it, where they can change."""
        return {} if self.weights is None else {"weights_version": self.weights.version}

    @property
    def is_open(self) -> bool:
        """Whether any sample still runs."""
        return self.num_open > 0 and self.failure is None

    @property
    def is_read(self) -> bool:
        """Whether `next` has returned everything, up to the regular end."""
        return not self.num_open and not self._unread and self.failure is None

    @property
    def resumed_usage(self) -> dict[str, int]:
        """What the usage in a response says of how often the answer went on at another engine, if it did."""
        return {"resumed": self.num_resumed} if self.num_resumed else {}

    async def next(self) -> list[AnswerDelta]:
        """Wait for new parts and return them; empty once everything is read.

        Raises the failure that ended the answers.
        """
        while not self._unread:
            if self.failure is not None:
                raise self.failure
            if not self.num_open:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        unread, self._unread, self._num_unread = self._unread, [], 0
        return unread

    def accept(self) -> None:
        """Record that the engine has accepted the request."""
        self.is_accepted = True
        self.decided.set()

    def begin(self, begun: Begun) -> None:
        """Record that the prompt is computed, with what the engine reports about it."""
        if not self.num_resumed:  # else it is what the first engine found
            self.num_cached_tokens = max(self.num_cached_tokens, begun.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or begun.prompt_logprobs
        if begun.embedding:
            self.embedding = np.frombuffer(begun.embedding, dtype=np.float32)

    def replay(self, known: Continuation) -> None:
        """Take the tokens that were answered elsewhere, as if each had just come; before it is sent on.

        Raises BadRequest where they are a whole answer.
        """
        self.created_s, self.num_resumed = known.begun.created_s, known.num_resumed
        self.arrival_s -= known.age_s
        entries = [entry for part in known.logprobs for entry in part]
        for at, token in enumerate(known.known.tolist()):
            self.replayed += self.push(0, (token,), entries[at : at + 1], None)
        if not self.num_open:
            raise BadRequest("known_token_ids", "hold the end of the answer")
        self.num_cached_tokens = min(known.num_cached_tokens, self.request.num_prompt_tokens)
        self.last_token_s[0] = time.monotonic()

    def take(self, index: int, token: int, logprobs: TokenLogprobs | None, end: SampleEnd | None) -> bool:
        """Add one token of a sample, and the sample's end if it came with it.

        Returns whether the sample's text has just ended it (a stop string), so that the engine must be told.
        """
        if self.samples[index].finish_reason is not None:
            return False
        reason = None if end is None else end.reason
        if reason == "error":  # `finish` follows
            return False
        self._put(self.push(index, (token,), () if logprobs is None else (logprobs,), reason))
        return reason is None and self.samples[index].finish_reason is not None

    def finish(self, index: int, end: SampleEnd) -> None:
        """Record that the engine has ended a sample."""
        self.ends[index] = end
        if self.samples[index].finish_reason is not None:
            return
        if end.reason == "error":
            why = end.error or "the request failed"
            self.fail(BadRequest(None, why) if end.is_at_fault else RequestFailed(why))
            return
        if end.hypotheses:
            self.num_cached_tokens = end.num_cached_tokens
        self._put(self.end(index, end.reason, end.hypotheses))

    def fail(self, failure: Failure | BadRequest) -> None:
        """End all samples with this failure; what is unread can still be read."""
        if self.is_open:
            self.failure = failure
            self._wake()
            self.failed.set()
            self.decided.set()

    def _put(self, deltas: list[AnswerDelta]) -> None:
        if not deltas:
            return
        for delta in deltas:
            self._unread.append(delta)
            self._num_unread += len(delta.tokens)
        self._wake()
        if self._num_unread > self._most_unread_tokens and self.is_open:
            self.fail(
                CutOff(
                    f"{self._num_unread} tokens were not read; a client may leave {self._most_unread_tokens}"
                    " unread (server.max_unread_tokens): read faster, or ask for fewer at once",
                    "slow_reader",
                )
            )

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _detokenizer(request: Request, text: Text | None, options: TextOptions) -> Detokenizer | None:
    return None if text is None or request.params.beam_width else options.detokenizer(text, request.params)


def _rank(sample: AnswerDelta) -> tuple[bool, bool, bool, float]:
    """Return a key by which the best of several samples is the least."""
    is_whole = sample.finish_reason in ("stop", "length")
    per_token = sample.cumulative_logprob / max(1, len(sample.tokens))
    return sample.finish_reason == "error", not is_whole, not sample.tokens, -per_token


def finite(value: float) -> float:
    """Return a log-probability or a score as a number that JSON can hold."""
    return value if math.isfinite(value) else _NO_CHANCE


def unit(embedding: Vector, dimensions: int | None = None) -> Vector:
    """Return the first `dimensions` numbers (None: all), scaled to Euclidean length 1.

    A zero vector stays zero.
    """
    kept = embedding[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept))
    scaled: Vector = (kept / length if length else kept).astype(np.float32)
    return scaled
