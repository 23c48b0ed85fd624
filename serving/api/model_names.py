"""Define the names by which clients may ask for the model and its adapters, list them, and load adapters.

An operator loads and unloads adapters by routes that are named as vLLM names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from borders.refusal import BadRequest
from serving.adapters import KnownAdapters
from serving.api.errors import NotFound
from serving.api.schemas import StrictBody
from serving.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The server's own name (used in metrics), its aliases for the same model, and the model's adapters."""

    name: str
    aliases: tuple[str, ...]
    adapters: KnownAdapters

    @property
    def all(self) -> tuple[str, ...]:
        """Every name once: the server's own first, adapters last."""
        return tuple(dict.fromkeys((*self.of_model, *(each.name for each in self.adapters.all))))

    @property
    def of_model(self) -> tuple[str, ...]:
        """The names that mean the model itself."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def asked(self, name: str | None) -> str:
        """Return the name that an answer to a request carries; raises NotFound for another model."""
        if name is None:
            return self.name
        if name not in self.all:
            raise NotFound.of_model(name, self.all)
        return name


class Entries:
    """The entries of the list of models, in the forms of two APIs."""

    def __init__(self, llm: AsyncLLM, names: ModelNames) -> None:
        self._llm = llm
        self._names = names
        self._born = datetime.now(timezone.utc).replace(microsecond=0)

    def for_openai(self, name: str) -> dict[str, Any]:
        """Return an entry as OpenAI's clients read it, with vLLM's fields."""
        facts, root = self._llm.facts, self._names.name
        named = {"id": name, "object": "model", "created": int(self._born.timestamp()), "owned_by": "local"}
        parent = {} if name in self._names.of_model else {"parent": root}
        return (
            named | {"root": root} | parent | ({} if facts is None else {"max_model_len": facts.max_tokens})
        )

    def for_anthropic(self, name: str) -> dict[str, Any]:
        """Return an entry as Anthropic's clients read it."""
        limit = None if self._llm.facts is None else self._llm.facts.max_tokens
        return anthropic_entry(name, self._born, limit)


def anthropic_entry(name: str, born: datetime, limit: int | None) -> dict[str, Any]:
    """Return an entry of the list of models as Anthropic's clients read it."""
    named = {"type": "model", "id": name, "display_name": name, "lifecycle": "active"}
    return named | {"created_at": born.isoformat(), "max_input_tokens": limit, "max_tokens": limit}


def anthropic_list(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list of models, of which there is one at least, as Anthropic's clients read it."""
    first, last = entries[0]["id"], entries[-1]["id"]
    return {"data": [*entries], "has_more": False, "first_id": first, "last_id": last}


class LoadBody(StrictBody):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(description="by which requests ask for it, as their `model`")
    lora_path: str = Field(description="a folder below `adapters.root`, as peft saves it")


class UnloadBody(StrictBody):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


ANTHROPICS = "anthropic-version"  # the header by which Anthropic's clients are told apart


def router(llm: AsyncLLM, names: ModelNames, route: type[APIRoute]) -> APIRouter:
    """Return a router that lists the names, and loads adapters where the recipe has adapters.root."""
    routes, entries = APIRouter(route_class=route), Entries(llm, names)

    @routes.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The served model under each of its names, and its limits."""
        if ANTHROPICS in request.headers:
            return anthropic_list([*map(entries.for_anthropic, names.all)])
        return {"object": "list", "data": [entries.for_openai(name) for name in names.all]}

    @routes.get("/v1/models/{name:path}")
    async def retrieve(name: str, request: Request) -> dict[str, Any]:
        """The served model under one of its names."""
        is_anthropics = ANTHROPICS in request.headers
        return (entries.for_anthropic if is_anthropics else entries.for_openai)(names.asked(name))

    @routes.post("/v1/load_lora_adapter", response_class=Response)
    async def load(body: LoadBody) -> Response:
        """Load an adapter; the answer comes when requests can ask for it."""
        llm.check_ready()
        if body.lora_name in names.of_model:
            raise BadRequest("lora_name", "is the name of the model", value=body.lora_name)
        await llm.adapters.load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload(body: UnloadBody) -> Response:
        """Unload an adapter; requests that have begun go on, and its place is free when they have ended."""
        llm.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
