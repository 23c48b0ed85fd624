"""Estimate a prompt's page keys in the router, before any replica has seen the prompt.

With the recipe of the replicas, these are exactly the keys of its pages: the same template, tokenizer, page
size, salt and adapters. Without a recipe they are keys of the first parts of its text, which show that
prompts begin alike, but nothing about pages.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from borders.field_table import PROMPT
from borders.refusal import BadRequest
from continuous_batching.routing.routing import RoutedPrompt
from kv_cache.page_keys import page_keys, short_key
from serving.adapters import NO_ADAPTERS, KnownAdapters
from serving.api.access import check_size
from serving.api.api_keys import Client
from serving.api.messages import MessagesBody
from serving.api.responses_input import messages_of, tool_choice_of, tools_of
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

PART_BYTES = 256  # bytes of a part of a text
BYTES_A_TOKEN = 4  # an estimate
_MOST_PARTS = 4096
MOST_VALUES = 300_000  # a body with more is judged by its text; replicas refuse it by default
MOST_LENIENT_BYTES = 2**20  # a body that `RoutedBody` does not fit is decoded on the event loop
OWN_LIMIT = "the router's own limit"  # what refusals call what is no setting of it
_PROMPT_FIELDS = (*PROMPT, "tools", "tool_choice")


class RoutedBody(msgspec.Struct):
    """The fields of a body that matter to a router; all others are passed on unread."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    user: str | None = None
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def text(self) -> bytes:
        """What the prompt is made of, in the order in which chat templates show it."""
        before = (bytes(each) for each in (self.system, self.instructions, self.tools))
        return b"".join(before) + (bytes(self.messages) or bytes(self.prompt) or bytes(self.input))


class RoutedResponse(msgspec.Struct):
    """The fields of a body of `/v1/responses` that make its prompt."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(RoutedBody).decode
_decode_response = msgspec.json.Decoder(RoutedResponse).decode


def _read_leniently(body: bytes, trouble: Exception) -> RoutedBody:
    """Read a body as Python does, which takes half a character's escape and NaN, as replicas do.

    `trouble` is why it could not be read otherwise. Raises HTTPException where it would take too long.
    """
    if not body[:PART_BYTES].lstrip().startswith(b"{"):  # it may be a form with a file
        return RoutedBody()
    if len(body) > MOST_LENIENT_BYTES:
        limit = f"one of at most {MOST_LENIENT_BYTES} bytes would be read all the same ({OWN_LIMIT})"
        raise HTTPException(400, f"the body cannot be read: {trouble}; {limit}")
    check_size(body, MOST_VALUES, OWN_LIMIT)
    with suppress(ValueError, RecursionError):
        found = json.loads(body)
        model, stream = (found.get(name) for name in ("model", "stream"))
        return RoutedBody(
            model=model if isinstance(model, str) else None,
            stream=stream if isinstance(stream, bool) else None,
        )
    return RoutedBody()


class Prompts:
    """Reads prompts; `text`, `page_size` and `adapters` are those of the replicas, or None, 0 and none.

    A body of more than `most_values` is judged by its text.
    """

    def __init__(
        self,
        text: Text | None = None,
        page_size: int = 0,
        adapters: KnownAdapters = NO_ADAPTERS,
        most_values: int = MOST_VALUES,
    ) -> None:
        self._text = text
        self._adapters = adapters
        self.page_size = page_size
        self._most_values = most_values

    def asked(self, body: bytes) -> RoutedBody:
        """Return the fields of a body; of one that cannot be read whole, its model and whether it streams.

        Raises HTTPException for one that cannot, and is too large to be read in another way.
        """
        try:
            return _decode(body)
        except (ValueError, msgspec.MsgspecError, RecursionError) as trouble:
            return _read_leniently(body, trouble)

    def read(
        self,
        body: bytes,
        asked: RoutedBody,
        client: Client,
        *,
        is_of_recipe: bool = True,
        is_message: bool = False,
    ) -> RoutedPrompt:
        """Return what is known of the prompt; of one for another model than the recipe's, by its text.

        A body of `/v1/messages` `is_message`.
        """
        salt = client.salted(asked.cache_salt or "")
        if self.page_size and is_of_recipe:
            try:
                check_size(body, self._most_values)
                if is_message:
                    return self._pages(_of_a_message(body), salt)
                if bytes(asked.input):
                    return self._pages(_of_a_chat(_decode_response(body)), salt)
                return self._pages(msgspec.json.decode(body, type=dict[str, Any]), salt)
            except (HTTPException, BadRequest, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # the replica will say what is wrong with it
        return _parts(asked.text, asked.model, salt)

    def _pages(self, fields: dict[str, Any], salt: str) -> RoutedPrompt:
        known = {name: fields[name] for name in _PROMPT_FIELDS if fields.get(name) is not None}
        prompt = known.get("prompt")
        if isinstance(prompt, list) and prompt:  # several prompts are judged by the first
            ids = prompt if isinstance(prompt[0], int) else prompt[0]
            known["prompt_token_ids" if isinstance(ids, list) else "prompt"] = ids
            if isinstance(ids, list):
                del known["prompt"]
        if isinstance(name := fields.get("model"), str) and self._adapters.knows(name):
            known["adapter"] = name
        request = parse_request(
            {"id": "routed", "cache_salt": salt, **known}, self._text, adapters=self._adapters
        )
        keys = page_keys(request.prompt, self.page_size, request.cache_salt)
        return RoutedPrompt(request.num_prompt_tokens, [*map(short_key, keys)], self.page_size)


def _of_a_chat(body: RoutedResponse) -> dict[str, Any]:
    """Translate the prompt of `/v1/responses` into fields of a chat; raises BadRequest."""
    return {
        "model": body.model,
        "messages": messages_of(body.input, body.instructions),
        "tools": None if body.tools is None else tools_of(body.tools),
        "tool_choice": None if body.tool_choice is None else tool_choice_of(body.tool_choice),
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _of_a_message(body: bytes) -> dict[str, Any]:
    """Translate a body of `/v1/messages` into fields of a chat; raises BadRequest."""
    try:
        read = MessagesBody.model_validate_json(body)
    except ValueError as error:
        raise BadRequest(None, "the body cannot be read") from error
    return read.fields() | {"model": read.model}


def _parts(text: bytes, model: str | None, salt: str) -> RoutedPrompt:
    key, keys = hash((model, salt)), []
    for at in range(0, min(len(text) // PART_BYTES, _MOST_PARTS) * PART_BYTES, PART_BYTES):
        # The hash depends on this process's secret, so no client can construct a collision.
        key = hash((key, text[at : at + PART_BYTES]))
        keys.append(key)
    return RoutedPrompt(-(-len(text) // BYTES_A_TOKEN), keys, PART_BYTES // BYTES_A_TOKEN)
