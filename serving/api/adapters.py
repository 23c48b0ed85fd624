"""Serve the routes by which an operator loads and unloads adapters while the server runs.

The routes and their bodies are named as vLLM names them.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from borders.refusal import BadRequest
from serving.api.model_names import ModelNames
from serving.api.schemas import StrictBody
from serving.async_llm import AsyncLLM


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
