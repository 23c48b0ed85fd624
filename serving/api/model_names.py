"""Define the names by which clients may ask for the model and its adapters, and serve the adapters' routes.

An operator loads and unloads adapters by these routes while the server runs. The routes and their bodies are
named as vLLM names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
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


class LoadBody(StrictBody):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(description="by which requests ask for it, as their `model`")
    lora_path: str = Field(description="a folder below `adapters.root`, as peft saves it")


class UnloadBody(StrictBody):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


def adapters_router(llm: AsyncLLM, names: ModelNames, route: type[APIRoute]) -> APIRouter:
    """Return a router with both routes; a recipe enables them by adapters.root."""
    routes = APIRouter(route_class=route)

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
