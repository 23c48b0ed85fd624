"""Attach to a request the keys of its prompt's pages, which the engine matches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from continuous_batching.request import Request
from kv_cache.page_keys import page_keys
from serving.engine.messages import EngineFacts

# A field beside those of `parse_request`, stored as `Request.prompt_replica`.
PROMPT_REPLICA = "prompt_replica"


def parted(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Split off the replica that may compute the prompt from the fields of `parse_request`."""
    known = {name: value for name, value in fields.items() if name != PROMPT_REPLICA}
    return known, fields.get(PROMPT_REPLICA, "")


def with_pages(request: Request, facts: EngineFacts, prompt_replica: str) -> Request:
    """Set the keys of the request's pages; hashing them in the engine would delay a step."""
    shared = facts.max_shared_tokens
    if facts.prefix_sharing and (shared is None or request.num_prompt_tokens <= shared):
        request.page_keys = page_keys(request.prompt, facts.page_size, request.cache_salt)
    request.prompt_replica = prompt_replica
    return request
