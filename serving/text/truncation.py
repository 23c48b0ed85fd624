"""Cut a prompt where the request allows it.

As in vLLM the last tokens are kept: `truncate_prompt_tokens` of them, or with -1 as many as leave room for
the answer. What the tokenizer or the chat template puts at the beginning is cut like the rest.
"""

from __future__ import annotations

from borders.refusal import BadRequest
from continuous_batching.request import Request, TokenIds


def truncated(prompt: TokenIds, asked: int, limit: int | None, num_answer: int) -> TokenIds:
    """Return the tokens of a prompt that are kept beside an answer of `num_answer`.

    Raises BadRequest if more than `limit` are asked for.

    Without a limit, -1 keeps all tokens (see `fit`). Where the answer leaves no room, one token is kept, and
    the scheduler refuses the request as too long.
    """
    if limit is not None and asked > limit:
        raise BadRequest(
            "truncate_prompt_tokens",
            value=asked,
            limit=f"-1 (as many as fit) or from 1 to {limit}, the model's maximum context length",
        )
    if asked == -1:
        if limit is None:
            return prompt
        asked = max(1, limit - num_answer)
    return prompt[-asked:]


def fit(request: Request, limit: int) -> None:
    """Cut the prompt of a request that asked for -1, and of its samples, once the limit is known."""
    prompt = truncated(request.prompt, -1, limit, request.params.max_tokens)
    for each in (request, *request.followers):
        each.prompt = each.tokens = prompt
