"""Serve `/v1/batches`: clients create, list, read and cancel batches of requests that are in a file.

The batches are run by batch_runner.py and kept by serving/batches/store.py.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from pydantic import Field

from borders.refusal import BadRequest, abbreviate_json
from serving.api.batch_runner import Batches
from serving.api.errors import NotFound
from serving.api.files import listed
from serving.api.items import check_repeated
from serving.api.schemas import IGNORED, Ignored, Name, StrictBody
from serving.batches.store import OPEN, BatchStore, StoredBatch
from serving.failures import Overloaded

PATH = "/v1/batches"
MOST_LISTED = 100
MOST_OPEN = 100  # most batches of one key that have not ended
_RETRY_S = 60.0


class BatchBody(StrictBody):
    """The body of `POST /v1/batches`."""

    ignored: ClassVar[Ignored] = {
        "metadata": IGNORED["metadata"],
        "output_expires_after": (lambda *_: False, ""),
    }
    input_file_id: Name = Field(description="a file of requests")
    endpoint: str = Field(description="the path that each of them goes to")
    completion_window: Literal["24h"] = Field(description="after which no more of them begin")
    metadata: dict[str, str] | None = Field(None, description="sent back as it came")


def batches_router(batches: Batches, endpoints: tuple[str, ...], route: type[APIRoute]) -> APIRouter:
    """Return a router with the routes; each request of a batch goes to one of `endpoints`."""
    routes = APIRouter(route_class=route, prefix=PATH)

    @routes.post("")
    async def create(body: BatchBody, request: Request) -> dict[str, Any]:
        """Create a batch from a file of requests."""
        if body.endpoint not in endpoints:
            raise BadRequest(
                "endpoint", value=body.endpoint, limit=" or ".join(map(abbreviate_json, endpoints))
            )
        owner = request.state.client.lasting
        batch = await batches.call(partial(created, owner=owner, body=body))
        batches.wake()
        return described(batch)

    @routes.get("")
    async def all_batches(
        request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20
    ) -> dict[str, Any]:
        """List the batches of this key, the newest first."""
        owner = request.state.client.lasting
        place = None if after is None else (await _found(batches, after, owner)).place
        found = await batches.call(partial(BatchStore.batches, owner=owner, after=place, most=limit + 1))
        return listed(found, limit, described)

    @routes.get("/{batch_id}")
    async def retrieve(batch_id: str, request: Request) -> dict[str, Any]:
        """Describe a batch and its progress."""
        return described(await _found(batches, batch_id, request.state.client.lasting))

    @routes.post("/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Begin no more requests of a batch; requests that run are completed."""
        owner = request.state.client.lasting
        batch = await _found(batches, batch_id, owner)
        await batches.call(partial(BatchStore.cancel, batch=batch))
        batches.wake()
        return described(await _found(batches, batch_id, owner))

    return routes


def created(store: BatchStore, owner: str, body: BatchBody) -> StoredBatch:
    """Create a batch of this owner in the store; raises BadRequest or Overloaded."""
    check_repeated("metadata", body.metadata)
    source = store.file(body.input_file_id, owner)
    if source is None or source.purpose != "batch":
        raise BadRequest("input_file_id", f"names no file of requests: {abbreviate_json(body.input_file_id)}")
    num_open = sum(each.owner == owner for each in store.open_batches())
    if num_open >= MOST_OPEN:
        raise Overloaded(f"{num_open} batches of this key have not ended; try again later", _RETRY_S)
    return store.add_batch(owner, source, body.endpoint, body.metadata or {})


async def _found(batches: Batches, batch_id: str, owner: str) -> StoredBatch:
    found = await batches.call(partial(BatchStore.batch, batch_id=batch_id, owner=owner))
    if found is None:
        raise NotFound(f"there is no batch {batch_id[:128]!r}")
    return found


def described(batch: StoredBatch) -> dict[str, Any]:
    """Describe a batch in the form of OpenAI's API."""
    names = ("completed", "expired", "cancelled", "failed", "finalizing")
    ends: dict[str, int | None] = {f"{each}_at": None for each in names}
    if batch.status not in OPEN:
        ends |= {"finalizing_at": batch.ended_s, f"{batch.status}_at": batch.ended_s}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input,
        "completion_window": "24h",
        "status": batch.status,
        "errors": None,
        "output_file_id": batch.output,
        "error_file_id": batch.errors,
        "created_at": batch.made_s,
        "in_progress_at": batch.begun_s,
        "expires_at": batch.expires_s,
        "cancelling_at": batch.cancelling_s,
        **ends,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": json.loads(batch.metadata) or None,
    }
