"""What does one request, as a client writes it, ask for?

The fields have the names of the OpenAI API, and a few further ones that vLLM's users know. Nothing is
guessed: an unknown field, a wrong type and a value out of range are refused by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from continuous_batching.refusal import BadRequest, shown
from continuous_batching.request import MOST_LOGPROBS, Request, SamplingParams
from serving.text.tokenizer import Text, TextOptions, check_unicode

_Reader = Callable[[str, Any], Any]
_LAST_ID = 2**31 - 1
LONGEST_NAME = 1024  # characters
MOST_SAMPLES = 128  # each takes a slot: more samples of one request would crowd out the others
_SHORT = 500  # characters, or tokens
_LONG = ("messages", "logit_bias", "stop", "stop_token_ids", "n", "best_of")  # these may take longer to read


def parse_request(fields: object, text: Text | None, *, longest: int | None = None) -> Request:
    """A request from a decoded JSON object; raises BadRequest.

    A field that is null counts as absent. `text` None: the model has no tokenizer, and prompts are token ids.
    With `longest`, an answer without max_tokens may be so long that prompt and answer come to that many.
    """
    if not isinstance(fields, Mapping):
        raise BadRequest(None, f"a request must be a JSON object, not {shown(fields)}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in _READERS:
            raise _unknown(name)
    values = {name: _READERS[name](name, value) for name, value in given.items()}
    if not values.get("id"):
        raise BadRequest("id", "is missing; it must be a string of at least one character")
    if "tenant" in values and "user" in values:
        raise BadRequest("tenant", "and user are two names of one field; give one of them")
    if "stop" in values and text is None:
        raise BadRequest("stop", "needs a tokenizer, and this model has none; use stop_token_ids")
    prompt = np.array(_prompt(values, text), dtype=np.int32)
    if longest is not None and not values.keys() & {"max_tokens", "max_completion_tokens"}:
        # Where too little room is left, the scheduler refuses the request as too long
        values["max_tokens"] = max(1, longest - len(prompt), min(values.get("min_tokens", 0), _LAST_ID))
    leader, *followers = (
        Request(
            id=f"{values['id']}#{index}" if index else values["id"],
            prompt=prompt,
            params=params,
            tenant=values.get("tenant", values.get("user", "")),
            cache_salt=values.get("cache_salt", ""),
            priority=values.get("priority", 0),
            arrival_s=values.get("arrival_s", 0.0),
            timeout_s=values.get("timeout_s"),
        )
        for index, params in enumerate(_samples(values))
    )
    leader.followers = followers
    return leader


def text_options(fields: Mapping[str, Any]) -> TextOptions:
    """How the answers to a request that `parse_request` accepted become text."""
    given = {name: fields[name] for name in _SHOWING if fields.get(name) is not None}
    return TextOptions(start=fields.get("messages") is not None, **given)


def check_length(fields: Mapping[str, Any], max_tokens: int, text: Text | None) -> None:
    """Raise BadRequest for a prompt that is too long however it is tokenised, before that work is done."""
    longest = 1 if text is None else text.longest_token
    ids, prompt = fields.get("prompt_token_ids") or (), fields.get("prompt") or ""
    if len(ids) > max_tokens or len(prompt) > max_tokens * longest:
        held = f"{len(ids)} tokens" if ids else f"{len(prompt)} characters"
        raise BadRequest(
            "prompt_token_ids" if ids else "prompt",
            f"holds {held}; model and cache hold {max_tokens} tokens",
            value=len(ids) or len(prompt),
            limit=max_tokens,
            fix="shorten it",
        )


def is_short(fields: Mapping[str, Any]) -> bool:
    """Whether a request is read in less time than it takes to wake a thread, which is about 0.3 ms."""
    prompt = fields.get("prompt") or fields.get("prompt_token_ids") or ()
    return len(prompt) <= _SHORT and not any(fields.get(name) for name in _LONG)


def _prompt(values: dict[str, Any], text: Text | None) -> list[int]:
    forms = [name for name in ("prompt", "messages", "prompt_token_ids") if name in values]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else "none of them"
        problem = f"exactly one of prompt, messages and prompt_token_ids must be given, not {found}"
        raise BadRequest(None, problem)
    prompt = values[forms[0]]
    if not prompt:
        raise BadRequest(forms[0], "is empty; it must hold at least one token")
    if forms[0] == "prompt_token_ids":
        return list(prompt)
    if text is None:
        raise BadRequest(forms[0], "needs a tokenizer, and this model has none; send prompt_token_ids")
    return text.encode(prompt) if forms[0] == "prompt" else text.chat(prompt)


def _params(values: dict[str, Any]) -> SamplingParams:
    named = {name: values[name] for name in _SAMPLING if name in values}
    if "max_completion_tokens" in values:
        named["max_tokens"] = values["max_completion_tokens"]
    logprobs = _logprobs(values)
    return SamplingParams(**named, logprobs=logprobs)


def _samples(values: dict[str, Any]) -> list[SamplingParams]:
    """The parameters of each sample of the prompt: `best_of` of them, or `n`, each with its own seed.

    A beam search is one request, and its `n` best hypotheses are the answers.
    """
    num_answers = values.get("n", 1)
    num_samples = values.get("best_of", num_answers)
    if not 1 <= num_answers <= MOST_SAMPLES:
        raise _wrong("n", num_answers, f"from 1 to {MOST_SAMPLES}")
    if not num_answers <= num_samples <= MOST_SAMPLES:
        raise _wrong("best_of", num_samples, f"from n ({num_answers}) to {MOST_SAMPLES}")
    params = _params(values)
    if params.beam_width:
        if "best_of" in values:
            raise _wrong("best_of", num_samples, "left out beside beam_width")
        if params.beam_width > MOST_SAMPLES:
            raise _wrong("beam_width", params.beam_width, f"at most {MOST_SAMPLES}")
        if num_answers > params.beam_width:
            raise _wrong("n", num_answers, f"at most beam_width ({params.beam_width})")
        return [params]
    if num_samples > num_answers and params.logprobs is None:
        params = replace(params, logprobs=0)  # samples are ranked by their log-probabilities
    if params.seed is None:
        return [params] * num_samples
    return [replace(params, seed=(params.seed + index) % 2**63) for index in range(num_samples)]


def _logprobs(values: dict[str, Any]) -> int | None:
    """`logprobs: n` as in completions, or `logprobs: true` with `top_logprobs: n` as in chats."""
    logprobs, top = values.get("logprobs", False), values.get("top_logprobs")
    if logprobs is True:
        if top is not None and not 0 <= top <= MOST_LOGPROBS:
            raise _wrong("top_logprobs", top, f"from 0 to {MOST_LOGPROBS}")
        return top or 0
    if top is not None:
        raise BadRequest("top_logprobs", f"needs logprobs: true, not {shown(logprobs)}")
    return None if logprobs is False else logprobs


def _unknown(name: object) -> BadRequest:
    near = difflib.get_close_matches(str(name), _READERS, n=1)
    rest = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(_READERS)}"
    return BadRequest(str(name), f"{shown(name)}; {rest}", subject="unknown field")


def _wrong(field: str, value: object, limit: str, *, place: str = "") -> BadRequest:
    return BadRequest(field, value=value, limit=limit, place=place)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _name(name: str, value: Any) -> str:
    """A string that is stored, sent on, and may be shown."""
    if len(_string(name, value)) > LONGEST_NAME:
        raise _wrong(name, value, f"at most {LONGEST_NAME} characters long")
    check_unicode(name, value)
    return value


def _integer(name: str, value: Any, *, place: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "an integer", place=place)
    return value


def _number(name: str, value: Any, *, place: str = "") -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        raise _wrong(name, value, "a number", place=place)
    return float(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _early(name: str, value: Any) -> bool | str:
    if value != "never" and not isinstance(value, bool):
        raise _wrong(name, value, 'true, false or "never"')
    return value


def _top_k(name: str, value: Any) -> int:
    return 0 if _integer(name, value) == -1 else int(value)  # -1 means off, as in vLLM


def _count_or_boolean(name: str, value: Any) -> int | bool:
    return value if isinstance(value, bool) else _integer(name, value)


def _seconds(name: str, value: Any) -> float:
    if (seconds := _number(name, value)) < 0:
        raise _wrong(name, value, "0 or more seconds")
    return seconds


def _timeout(name: str, value: Any) -> float:
    if (timeout_s := _number(name, value)) <= 0:
        raise _wrong(name, value, "above 0 seconds")
    return timeout_s


def _priority(name: str, value: Any) -> int:
    if abs(priority := _integer(name, value)) > _LAST_ID:
        raise _wrong(name, value, f"an integer from {-_LAST_ID} to {_LAST_ID}")
    return priority


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise _wrong(name, value, "a string or a list of strings")
    for each in strings:
        check_unicode(name, each)
    return tuple(strings)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list of token ids")
    if value and ({*map(type, value)} != {int} or min(value) < 0 or max(value) > _LAST_ID):
        for index, token in enumerate(value):  # only to name the wrong one: long prompts are checked above
            if _integer(name, token, place=f"[{index}]") not in range(_LAST_ID + 1):
                raise _wrong(name, token, "a token id", place=f"[{index}]")
    return tuple(value)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong(name, value, 'an object of token ids and numbers, such as {"123": -1.5}')
    for token in value:
        if not re.fullmatch(r"[0-9]{1,10}", str(token)) or int(token) > _LAST_ID:
            raise _wrong(name, value, f"an object whose keys are token ids; {shown(token)} is none")
    return {int(token): _number(name, bias, place=f"[{token}]") for token, bias in value.items()}


def _anything(name: str, value: Any) -> Any:
    return value


_SAMPLING: dict[str, _Reader] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_k": _top_k,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _integer,
    "logit_bias": _biases,
    "prompt_logprobs": _integer,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "beam_width": _integer,
    "length_penalty": _number,
    "early_stopping": _early,
}
_SHOWING: dict[str, _Reader] = {
    "skip_special_tokens": _boolean,
    "include_stop_str_in_output": _boolean,
}
_READERS: dict[str, _Reader] = {
    "id": _name,
    "prompt": _string,
    "prompt_token_ids": _token_ids,
    "messages": _anything,  # Text.chat checks them
    **_SAMPLING,
    **_SHOWING,
    "max_completion_tokens": _integer,
    "n": _integer,
    "best_of": _integer,
    "logprobs": _count_or_boolean,
    "top_logprobs": _integer,
    "arrival_s": _seconds,
    "timeout_s": _timeout,
    "tenant": _name,
    "user": _name,
    "cache_salt": _name,
    "priority": _priority,
}
FIELDS = frozenset(_READERS)
