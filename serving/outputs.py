"""Define what a Python program sends and receives, under the names of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from borders.field_table import taken_by
from borders.refusal import BadRequest
from continuous_batching.request import Request, TokenLogprobs
from serving.answers.answers import AnswerDelta
from serving.text.tokenizer import Text

Params = TypeVar("Params")
# {"prompt": ...} or {"prompt_token_ids": ...}, and optionally "cache_salt", "adapter"
Prompt = str | Mapping[str, Any]


def _with_fields(params: type[Params]) -> type[Params]:
    """Return the class as a dataclass of the fields that Python takes."""
    for each in taken_by("Python"):
        params.__annotations__[each.name] = each.kind.hint | None
        setattr(params, each.name, each.default)
    return dataclass(slots=True, kw_only=True)(params)


@_with_fields
class VllmSamplingParams:
    """How to choose the tokens of answers, and when to end, by the names of vLLM's SamplingParams.

    borders/field_table.py declares the fields; `help` lists their names, types and defaults. The values are
    checked when they are used, by serving/text/request_fields.py, where None counts as absent: an answer
    without `max_tokens` has as many tokens as fit.
    """

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def asked(self) -> dict[str, Any]:
        """Return the fields of a request with these values."""
        return {each.name: getattr(self, each.name) for each in taken_by("Python")}

    @property
    def shows_logprobs(self) -> bool:
        """Whether log-probabilities are asked for; 0 asks for those of the chosen tokens."""
        return self.logprobs is not None and self.logprobs is not False


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability; rank 1 is the likeliest token, None is a token outside those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


Logprobs = dict[int, Logprob]  # keyed by token id: the token at this position first, then the likeliest ones


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer; `finish_reason` is stop, length, timeout, or error if the logits were not finite.

    `token_ids` end with the token that ended the answer; `stop_reason` is the stop string or stop token. The
    model's further end tokens are stop tokens, too; the tokenizer's own is none.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None where log-probabilities were not asked for
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt so far; `prompt_logprobs` has None for the first token."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


@dataclass(slots=True)
class _Answer:
    """One answer so far, with its log-probabilities as a Python program sees them."""

    so_far: AnswerDelta
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class GrowingOutput:
    """What is known of growing answers to a request; `with_logprobs` says that those were asked for.

    Each entry of log-probabilities is converted once, however often the answers are told.
    """

    def __init__(
        self, request: Request, text: Text | None, *, prompt: str | None, with_logprobs: bool
    ) -> None:
        self._request = request
        self._text = text
        self._prompt = prompt
        self._prompt_token_ids: list[int] = request.prompt.tolist()
        self._prompt_logprobs: list[Logprobs | None] = []
        self._with_logprobs = with_logprobs
        self._answers: dict[int, _Answer] = {}

    def take(self, deltas: Iterable[AnswerDelta]) -> None:
        """Add new parts of the answers."""
        for delta in deltas:
            known = self._answers.get(delta.index)
            if known is None:
                known = self._answers[delta.index] = _Answer(delta)
            else:
                known.so_far.extend(delta)
            if self._with_logprobs:
                known.logprobs += [_logprobs_of(each, self._text) for each in delta.logprobs]
                for each in delta.logprobs:
                    known.cumulative_logprob += each.logprob

    def output(
        self, prompt_logprobs: Sequence[TokenLogprobs], *, finished: bool, num_cached_tokens: int
    ) -> RequestOutput:
        """Return what is known, which stays as it is while the answers grow."""
        is_asked = self._request.params.prompt_logprobs is not None
        if is_asked and len(self._prompt_logprobs) != 1 + len(prompt_logprobs):
            self._prompt_logprobs = [None, *(_logprobs_of(each, self._text) for each in prompt_logprobs)]
        return RequestOutput(
            request_id=self._request.id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            prompt_logprobs=list(self._prompt_logprobs) if is_asked else None,
            outputs=[self._completion(each) for _, each in sorted(self._answers.items())],
            finished=finished,
            num_cached_tokens=num_cached_tokens,
        )

    def _completion(self, known: _Answer) -> CompletionOutput:
        answer, cumulative_logprob = known.so_far, None
        if answer.hypothesis is not None:
            cumulative_logprob = answer.hypothesis.cumulative_logprob
        elif self._with_logprobs:
            cumulative_logprob = known.cumulative_logprob
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=list(answer.tokens),
            cumulative_logprob=cumulative_logprob,
            logprobs=list(known.logprobs) if self._with_logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )


def _logprobs_of(entry: TokenLogprobs, text: Text | None) -> Logprobs:
    """Return the log-probabilities at one position, by token id."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    values = {entry.token: entry.logprob} | dict(entry.top)
    return {token: Logprob(value, ranks.get(token), _piece(token, text)) for token, value in values.items()}


def _piece(token: int, text: Text | None) -> str | None:
    return None if text is None else text.decode([token], skip_special_tokens=False, start=False)


_OF_PROMPTS = {"prompt", "prompt_token_ids", "cache_salt", "adapter"}


def fields_of(prompt: object) -> dict[str, Any]:
    """Return the fields of a request with a prompt; raises BadRequest for anything else."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and set(prompt) <= _OF_PROMPTS:
        return dict(prompt)
    raise BadRequest(
        "prompt",
        'is no prompt; give a string, {"prompt": ...} or {"prompt_token_ids": ...}',
        subject=f"{prompt!r:.60}",
    )
