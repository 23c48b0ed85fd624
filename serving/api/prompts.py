"""Read the prompts that a client sends in one field."""

from __future__ import annotations

from typing import Any

from borders.refusal import BadRequest


def prompts_of(given: str | list[Any]) -> list[dict[str, Any]]:
    """Return the prompts as fields of requests, each a text or token ids."""
    if not given and not isinstance(given, str):
        raise BadRequest("prompt", "is empty; it must hold at least one token")
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]
