"""Define what a Python program sends and receives, under the names of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    `token_ids` end with the token that ended the answer; `stop_reason` is the stop string or stop token.
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


def request_output(
    request: Request,
    text: Text | None,
    answers: Iterable[AnswerDelta],
    *,
    prompt: str | None,
    prompt_logprobs: Sequence[TokenLogprobs],
    with_logprobs: bool,
    finished: bool,
    num_cached_tokens: int,
) -> RequestOutput:
    """Return what is known of the answers to a request; `with_logprobs` says that they were asked for."""
    is_asked = request.params.prompt_logprobs is not None
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.prompt.tolist(),
        prompt_logprobs=[None, *(_logprobs_of(each, text) for each in prompt_logprobs)] if is_asked else None,
        outputs=[_completion(each, text, with_logprobs) for each in sorted(answers, key=lambda a: a.index)],
        finished=finished,
        num_cached_tokens=num_cached_tokens,
    )


def _completion(answer: AnswerDelta, text: Text | None, with_logprobs: bool) -> CompletionOutput:
    is_known = with_logprobs or answer.hypothesis is not None
    return CompletionOutput(
        index=answer.index,
        text=answer.text,
        token_ids=list(answer.tokens),
        cumulative_logprob=answer.cumulative_logprob if is_known else None,
        logprobs=[_logprobs_of(each, text) for each in answer.logprobs] if with_logprobs else None,
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
