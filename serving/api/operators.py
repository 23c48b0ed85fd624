"""Serve the routes by which an operator halts an engine, puts it to sleep and gives it other weights.

A recipe enables them by `server.weights_root`. They are for operators alone, as traces are.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field

from borders.refusal import BadRequest
from serving.api.api_keys import ANYBODY, Client
from serving.api.errors import Forbidden
from serving.api.schemas import StrictBody
from serving.async_llm import AsyncLLM
from serving.orders import LONGEST_VERSION, Running


def check_operator(request: Request, deed: str, *, is_local: bool) -> None:
    """Raise Forbidden unless a request comes from an operator, and from no page in a browser.

    `deed` says what it asks for; see AccessControl for `is_local`.
    """
    client: Client = request.state.client
    if not client.may_operate or (client is ANYBODY and not is_local):
        raise Forbidden(f"this key may not {deed}, which concerns every client; use an operator's")
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
        raise Forbidden(f"pages in a browser may not {deed}; send it from a command line")


_Running = Annotated[
    Running,
    Field(
        description="what becomes of requests that are open: wait for their end, abort them (503), or refuse"
        " the order while there are any"
    ),
]


class SleepBody(StrictBody):
    """The body of `POST /sleep`."""

    running: _Running = "wait"


class UpdateBody(StrictBody):
    """The body of `POST /update_weights`: a folder, or a segment of shared memory and its digest."""

    path: str | None = Field(None, description="a checkpoint's folder below `server.weights_root`")
    shared_memory: str | None = Field(
        None, description="the name of POSIX shared memory that holds a file in the safetensors form"
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="shared_memory: the digest of its bytes"
    )
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/-]+$", max_length=LONGEST_VERSION)] | None = Field(
        None, description="the version's name in usage and metrics; null: a digest of the weights"
    )
    running: _Running = "wait"


def router(llm: AsyncLLM, route: type[APIRoute], *, is_local: bool) -> APIRouter:
    """Return a router with the routes of an operator's orders; see AccessControl for `is_local`."""
    routes, orders = APIRouter(route_class=route), llm.orders

    def check(request: Request) -> None:
        check_operator(request, "halt the engine or change its weights", is_local=is_local)

    @routes.post("/pause")
    async def pause(request: Request) -> dict[str, Any]:
        """Begin no step from now on; requests wait, and what runs stays as it is."""
        check(request)
        await orders.pause(is_on=True)
        return {"paused": True}

    @routes.post("/resume")
    async def resume(request: Request) -> dict[str, Any]:
        """Go on with steps."""
        check(request)
        await orders.pause(is_on=False)
        return {"paused": False}

    @routes.post("/sleep")
    async def sleep(request: Request, body: SleepBody | None = None) -> dict[str, Any]:
        """Give back the memory of all pages, once the requests that are open have ended; refuse others."""
        check(request)
        freed = await orders.sleep("wait" if body is None else body.running)
        return {"asleep": True, "num_bytes": freed}

    @routes.post("/wake")
    async def wake(request: Request) -> dict[str, Any]:
        """Allocate the pages again, and accept requests."""
        check(request)
        return {"asleep": False, "num_bytes": await orders.wake()}

    @routes.post("/update_weights")
    async def update(request: Request, body: UpdateBody) -> dict[str, Any]:
        """Replace the model's weights by others of the same shapes and types, or change nothing."""
        check(request)
        if (body.path is None) == (body.shared_memory is None):
            raise BadRequest(None, "exactly one of path and shared_memory must be given")
        if (body.shared_memory is None) != (body.sha256 is None):
            raise BadRequest("sha256", "goes with shared_memory: give both, or neither")
        if body.path is not None:
            weights = await orders.update_from_folder(body.path, body.version, body.running)
        else:
            assert body.shared_memory is not None, "one of the two is given"
            assert body.sha256 is not None, "it goes with shared_memory"
            weights = await orders.update_from_segment(
                body.shared_memory, body.sha256, body.version, body.running
            )
        return {"weights_version": weights.version, "system_fingerprint": weights.fingerprint}

    return routes
