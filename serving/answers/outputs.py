"""What do Python programs ask with, and what do they get? The names are vLLM's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from continuous_batching.request import TokenLogprobs
from serving.answers.answers import Answer, Delta
from serving.text.tokenizer import Text

Prompt = str | Mapping[str, Any]  # {"prompt": ...} or {"prompt_token_ids": ...}, and "cache_salt"


@dataclass(slots=True)
class SamplingParams:
    """How to choose the tokens of answers, and when to end, by vLLM's names.

    What may be given is said once, in serving/text/request_fields.py, which looks at it when it is used.
    `max_tokens` None: as many as fit. `beam_width` searches for the `n` best answers in place of drawing
    them.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0, -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def asked(self) -> dict[str, Any]:
        """The fields of a request that say this."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability. `rank`: 1 is the likeliest; None: it is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


Logprobs = dict[int, Logprob]  # by token id: of the token that stands there, then of the likeliest


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason` is stop, length, timeout or, if the model's logits were not finite, error.

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
    """What became of one prompt. `prompt_logprobs` has None for the first token."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


async def growing(
    answer: Answer, text: Text | None, *, prompt: str | None, with_logprobs: bool
) -> AsyncIterator[RequestOutput]:
    """What is known of an answer, each time that there is more; raises the Failure that ended it."""
    request, known = answer.request, dict[int, Delta]()
    asked = request.params.prompt_logprobs is not None
    while deltas := await answer.next():
        for delta in deltas:
            if delta.index in known:
                known[delta.index].extend(delta)
            else:
                known[delta.index] = delta
        told = [logprobs_of(each, text) for each in answer.prompt_logprobs]
        yield RequestOutput(
            request_id=request.id,
            prompt=prompt,
            prompt_token_ids=request.prompt.tolist(),
            prompt_logprobs=[None, *told] if asked else None,
            outputs=[_completion(known[index], text, with_logprobs) for index in sorted(known)],
            finished=not answer.is_open,
            num_cached_tokens=answer.num_cached_tokens,
        )


def _completion(delta: Delta, text: Text | None, with_logprobs: bool) -> CompletionOutput:
    entries = delta.logprobs if with_logprobs else None
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=list(delta.tokens),
        cumulative_logprob=None if entries is None else sum(each.logprob for each in entries),
        logprobs=None if entries is None else [logprobs_of(each, text) for each in entries],
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )


def logprobs_of(entry: TokenLogprobs, text: Text | None) -> Logprobs:
    """The log-probabilities at one position, by token id."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    values = {entry.token: entry.logprob} | dict(entry.top)
    return {token: Logprob(value, ranks.get(token), _piece(token, text)) for token, value in values.items()}


def _piece(token: int, text: Text | None) -> str | None:
    return None if text is None else text.decode([token], skip_special_tokens=False, start=False)


def fields_of(prompt: object) -> dict[str, Any]:
    """The fields of a request that say a prompt; raises ValueError for what is none."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and set(prompt) <= {"prompt", "prompt_token_ids", "cache_salt"}:
        return dict(prompt)
    raise ValueError(
        f'{prompt!r:.60} is no prompt; give a string, {{"prompt": ...}} or {{"prompt_token_ids": ...}}'
    )
