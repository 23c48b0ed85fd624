"""How does Prometheus ask?"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from serving.async_llm import AsyncLLM
from serving.metrics.exposition import CONTENT_TYPE, Exposition


def router(llm: AsyncLLM, model: str) -> APIRouter:
    """The route, which needs a key where others do; Prometheus can bring one."""
    routes = APIRouter()
    exposition = Exposition(llm.tally, model, lambda: llm.engine.pid)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """All metrics, as text."""
        exposition.read()
        return Response(await asyncio.to_thread(exposition.text), headers={"content-type": CONTENT_TYPE})

    return routes
