"""What does one request, as a client writes it, ask for?

The fields and their names are those of the OpenAI API, and a few that vLLM's users know beside them. Nothing
is guessed: an unknown field, a wrong type and a value out of range are refused by name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from continuous_batching.request import MOST_LOGPROBS, Request, SamplingParams
from serving.answers.samples import MOST_SAMPLES
from serving.text.detokenizer import TextOptions
from serving.text.tokenizer import Text, check_unicode

_Reader = Callable[[str, Any], Any]
_LAST_ID = 2**31 - 1
LONGEST_NAME = 1024  # characters


def parse_request(fields: object, text: Text | None) -> Request:
    """A request from a decoded JSON object; raises ValueError, in one line, for one that cannot be meant.

    A field that is null counts as absent. `text` None: the model has no tokenizer, and prompts are token ids.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"a request must be a JSON object, not {_show(fields)}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in _READERS:
            raise ValueError(_unknown(name))
    values = {name: _READERS[name](name, value) for name, value in given.items()}
    if not values.get("id"):
        raise ValueError("id is missing; it must be a string of at least one character")
    if "tenant" in values and "user" in values:
        raise ValueError("tenant and user are two names of one field; give one of them")
    if "stop" in values and text is None:
        raise ValueError("stop needs a tokenizer, and this model has none; use stop_token_ids")
    prompt = np.array(_prompt(values, text), dtype=np.int32)
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
    """How the answers to a request that `parse_request` took are to be shown."""
    given = {name: fields[name] for name in _SHOWING if fields.get(name) is not None}
    return TextOptions(start=fields.get("messages") is not None, **given)


def _prompt(values: dict[str, Any], text: Text | None) -> list[int]:
    forms = [name for name in ("prompt", "messages", "prompt_token_ids") if name in values]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else "none of them"
        raise ValueError(f"exactly one of prompt, messages and prompt_token_ids must be given, not {found}")
    prompt = values[forms[0]]
    if not prompt:
        raise ValueError(f"{forms[0]} is empty; it must hold at least one token")
    if forms[0] == "prompt_token_ids":
        return list(prompt)
    if text is None:
        raise ValueError(f"{forms[0]} needs a tokenizer, and this model has none; send prompt_token_ids")
    return text.encode(prompt) if forms[0] == "prompt" else text.chat(prompt)


def _params(values: dict[str, Any]) -> SamplingParams:
    named = {name: values[name] for name in _SAMPLING if name in values}
    if "max_completion_tokens" in values:
        named["max_tokens"] = values["max_completion_tokens"]
    logprobs = _logprobs(values)
    return SamplingParams(**named, logprobs=logprobs)


def _samples(values: dict[str, Any]) -> list[SamplingParams]:
    """The parameters of each sample of the prompt: `best_of` of them, or `n`, each with its own seed.

    A beam search is one request, whose `n` best hypotheses are the answers.
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
            raise ValueError(f"best_of is {num_samples}; it must be left out beside beam_width")
        if params.beam_width > MOST_SAMPLES:
            raise ValueError(f"beam_width is {params.beam_width}; it must be at most {MOST_SAMPLES}")
        if num_answers > params.beam_width:
            raise ValueError(f"n is {num_answers}; it must be at most beam_width ({params.beam_width})")
        return [params]
    if num_samples > num_answers and params.logprobs is None:
        params = replace(params, logprobs=0)  # they are ranked by it
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
        raise ValueError(f"top_logprobs needs logprobs: true, not {_show(logprobs)}")
    return None if logprobs is False else logprobs


def _unknown(name: object) -> str:
    near = difflib.get_close_matches(str(name), _READERS, n=1)
    rest = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(_READERS)}"
    return f"unknown field {_show(name)}; {rest}"


def _show(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=repr)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _wrong(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name} is {_show(value)}; it must be {allowed}")


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _name(name: str, value: Any) -> str:
    """A string that is kept, sent on, and may be shown."""
    if len(_string(name, value)) > LONGEST_NAME:
        raise _wrong(name, value, f"at most {LONGEST_NAME} characters long")
    check_unicode(name, value)
    return value


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "an integer")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        raise _wrong(name, value, "a number")
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
    return 0 if _integer(name, value) == -1 else int(value)  # -1: vLLM's way to say that it is off


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
        for index, token in enumerate(value):  # which of them: a long prompt is not gone over one by one
            if _integer(f"{name}[{index}]", token) not in range(_LAST_ID + 1):
                raise _wrong(f"{name}[{index}]", token, "a token id")
    return tuple(value)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong(name, value, 'an object of token ids and numbers, such as {"123": -1.5}')
    for token in value:
        if not re.fullmatch(r"[0-9]{1,10}", str(token)) or int(token) > _LAST_ID:
            raise _wrong(name, value, f"an object whose keys are token ids; {_show(token)} is none")
    return {int(token): _number(f"{name}[{token}]", bias) for token, bias in value.items()}


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
