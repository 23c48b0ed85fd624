"""Which paths does the server have?"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.api import errors, live, operations, prometheus
from serving.api.api_keys import Keys
from serving.api.completions import Completions
from serving.api.guard import Guard
from serving.api.methods import Methods
from serving.api.schemas import ChatBody, CompletionBody
from serving.async_llm import AsyncLLM


def application(
    llm: AsyncLLM, model: str, keys: Keys, cors_origins: Sequence[str] = (), *, is_local: bool
) -> ASGIApp:
    """The server, behind its guard. The model is called `model`; see Guard for `is_local`.

    Pages of `cors_origins` may ask from a browser; "*" stands for all.
    """
    app = FastAPI(
        title="Continuous batching",
        version=operations.VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    completions = Completions(llm, model)

    @app.post("/v1/completions", response_class=Response)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        return await completions.complete(body, request)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await completions.chat(body, request)

    app.include_router(operations.router(llm, model))
    app.include_router(operations.text_router(llm, model))
    app.include_router(live.router(llm))
    app.include_router(prometheus.router(llm, model))
    max_body_bytes = int(llm.recipe.server.max_body_mib * 2**20)
    guarded = Guard(Methods(app), keys, max_body_bytes, llm.tally.responded, is_local=is_local)
    return _open_to(cors_origins, guarded) if cors_origins else guarded


def _open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """A browser asks first, and without a key: so this stands before the guard."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
