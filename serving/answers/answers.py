"""What do the samples of one prompt answer, as their tokens come?

The same for requests that this process computes and for those whose tokens arrive from an engine's process:
tokens become text, a stop string ends a sample, the best of several samples are chosen, and the hypotheses of
a beam search become answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from continuous_batching.request import Hypothesis, Request, TokenLogprobs
from serving.engine.messages import BeamHypothesis
from serving.text.tokenizer import Detokenizer, Text, TextOptions

_NO_CHANCE = -9999.0  # in JSON, for a log-probability of minus infinity or not a number
Found = Hypothesis | BeamHypothesis  # in this process, or in an engine's


@dataclass(slots=True)
class AnswerDelta:
    """What is new of one answer. `logprobs` has as many entries as `tokens`, or none if not asked for."""

    index: int  # of the answer
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the token, that ended it
    sample: int = 0  # the index of the sample that it is from
    hypothesis: Found | None = None  # that it is, if it was found by a beam search

    def extend(self, more: AnswerDelta) -> None:
        """Append what comes next."""
        self.text += more.text
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason

    @property
    def cumulative_logprob(self) -> float:
        """Of all its tokens, as far as their log-probabilities are known."""
        if self.hypothesis is not None:
            return self.hypothesis.cumulative_logprob
        return sum(each.logprob for each in self.logprobs)


@dataclass(slots=True)
class SampleProgress:
    """One sample of a prompt."""

    request: Request
    detokenizer: Detokenizer | None  # None: the model has no tokenizer, or it is a beam search
    num_tokens: int = 0
    finish_reason: str | None = None
    held: AnswerDelta | None = None  # all of it, where samples are ranked when they have ended


def collect(known: dict[int, AnswerDelta], deltas: Iterable[AnswerDelta]) -> None:
    """Add what is new to what is known of each answer, by its index."""
    for delta in deltas:
        if delta.index in known:
            known[delta.index].extend(delta)
        else:
            known[delta.index] = delta


class SampleAnswers:
    """The samples of one prompt, of which `num_answers` are wanted.

    If all are wanted, each is an answer as it grows. If fewer are, the answers are the samples with the
    highest cumulative log-probability, of equal ones the first, when all have ended; a sample that failed is
    chosen only where no other is left.
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
        """Of all samples."""
        return sum(each.num_tokens for each in self.samples)

    def push(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], reason: str | None
    ) -> list[AnswerDelta]:
        """More tokens of a sample, and the reason if the last of them ended it; what is new of the answers.

        A sample may also end here by a stop string in its text: then its `finish_reason` is "stop" although
        no reason was given.
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
        is_stop_token = ended_by in sample.request.params.stop_token_ids
        return self._finish(sample, delta, reason, ended_by if is_stop_token else None)

    def end(self, index: int, reason: str, hypotheses: Sequence[Found] = ()) -> list[AnswerDelta]:
        """A sample ended without another token; what is new of the answers."""
        sample = self.samples[index]
        if sample.finish_reason is not None:
            return []
        if not hypotheses:
            return self._finish(sample, AnswerDelta(index, "", sample=index), reason, None)
        sample.finish_reason = reason
        self.num_open -= 1
        answers = [self._hypothesis(at, each) for at, each in enumerate(hypotheses[: self.num_answers])]
        sample.num_tokens = sum(len(each.tokens) for each in answers)
        return answers

    def _hypothesis(self, index: int, found: Found) -> AnswerDelta:
        options, text, tokens = self._options, "", np.asarray(found.tokens).tolist()
        if self._text is not None:
            text = self._text.decode(
                options.without_end(tokens, found.finish_reason),
                skip_special_tokens=options.skip_special_tokens,
                start=options.start,
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


def _detokenizer(request: Request, text: Text | None, options: TextOptions) -> Detokenizer | None:
    return None if text is None or request.params.beam_width else options.detokenizer(text, request.params)


def _rank(whole: AnswerDelta) -> tuple[bool, float]:
    return whole.finish_reason == "error", -whole.cumulative_logprob


def finite(value: float) -> float:
    """A log-probability or a score as JSON can write it."""
    return value if math.isfinite(value) else _NO_CHANCE
