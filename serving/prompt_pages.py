"""What does an engine hear of a prompt's pages, beside its tokens?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from continuous_batching.request import Request
from kv_cache.page_keys import page_keys
from serving.engine.messages import EngineFacts

PROMPT_REPLICA = "prompt_replica"  # a field beside those of `parse_request`; as `Request.prompt_replica`


def parted(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of `parse_request`, and who may compute the prompt."""
    known = {name: value for name, value in fields.items() if name != PROMPT_REPLICA}
    return known, fields.get(PROMPT_REPLICA, "")


def with_pages(request: Request, facts: EngineFacts, prompt_replica: str) -> Request:
    """The same request, with the keys of its pages: hashing them in the engine would delay a step."""
    shared = facts.max_shared_tokens
    if facts.prefix_sharing and (shared is None or request.num_prompt_tokens <= shared):
        request.page_keys = page_keys(request.prompt, facts.page_size, request.cache_salt)
    request.prompt_replica = prompt_replica
    return request
