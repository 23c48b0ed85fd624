"""How long may a prompt be, and how long its answer?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from continuous_batching.request import Request
from serving.engine.messages import Facts
from serving.text.tokenizer import Text

_SHORT = 500  # characters, or tokens
_LONG = ("messages", "logit_bias", "stop", "stop_token_ids", "n", "best_of")  # what may take longer to read


def too_long(fields: Mapping[str, Any], facts: Facts | None, text: Text | None) -> str | None:
    """Why a prompt need not even become tokens, if it can be seen at a look."""
    if facts is None:
        return None
    longest = 1 if text is None else text.longest_token
    ids, prompt = fields.get("prompt_token_ids") or (), fields.get("prompt") or ""
    if len(ids) <= facts.max_tokens and len(prompt) <= facts.max_tokens * longest:
        return None
    held = f"{len(ids)} tokens" if ids else f"{len(prompt)} characters"
    return f"prompt holds {held}; model and cache hold {facts.max_tokens} tokens: shorten it"


def is_short(fields: Mapping[str, Any]) -> bool:
    """Whether a request is read in less than it takes a thread to be woken: about 0.3 ms."""
    prompt = fields.get("prompt") or fields.get("prompt_token_ids") or ()
    return len(prompt) <= _SHORT and not any(fields.get(name) for name in _LONG)


def fill_up(samples: Sequence[Request], facts: Facts | None) -> None:
    """Let the answers be as long as model and cache allow."""
    assert facts is not None, "let in without an engine"
    left = max(1, facts.max_tokens - samples[0].num_prompt_tokens)
    for each in samples:
        each.params = replace(each.params, max_tokens=max(left, each.params.min_tokens))
