"""Serve the routes about the server itself: health, metrics, aborts and the tokenizer."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import JSONResponse, Response

from borders.field_table import taken_by
from borders.refusal import BadRequest
from borders.version import VERSION
from recipes.assembly import versions
from serving.api import operators
from serving.api.api_keys import Client
from serving.api.errors import NotFound
from serving.api.model_names import ModelNames
from serving.api.schemas import DetokenizeBody, StrictBody, TokenizeBody
from serving.async_llm import AsyncLLM
from serving.failures import CutOff, RequestFailed
from serving.metrics.exposition import CONTENT_TYPE, Exposition
from serving.text.chat_options import ChatOptions
from serving.text.tokenizer import Text
from serving.tools.definitions import tool_use


def routers(
    llm: AsyncLLM,
    names: ModelNames,
    model: str,
    route: type[APIRoute],
    continuations: Callable[[], str],
    *,
    is_local: bool,
) -> Iterator[APIRouter]:
    """Yield the routers of this module that the recipe asks for; see AccessControl for `is_local`.

    `continuations` returns the fingerprint of the servers at which answers may go on.
    """
    yield router(llm, names, continuations)
    yield text_router(llm, names, route)
    yield metrics_router(llm, model)
    if llm.recipe.server.profile is not None:
        yield profile_router(llm, route, is_local=is_local)
    if llm.recipe.server.weights_root is not None:
        yield operators.router(llm, route, is_local=is_local)


def router(llm: AsyncLLM, names: ModelNames, continuations: Callable[[], str]) -> APIRouter:
    """Return a router with the routes for operators of the server."""
    routes = APIRouter()
    described = versions.describe()

    @routes.get("/health")
    async def health() -> Response:
        """200 while the engine runs, starts for the first time, or shuts down as asked; 503 otherwise.

        `slow` means that the current step takes longer than expected. That alone is no failure, so only the
        body warns until the engine is ended for it.
        """
        engine = llm.engine
        if llm.state in ("lost", "dead"):
            return JSONResponse({"status": llm.state, "reason": engine.trouble} | engine.stage, 503)
        times = {"silent_s": round(engine.silent_s, 3), "limit_s": round(engine.silence.limit_s, 3)}
        return JSONResponse({"status": engine.status} | times | engine.stage)

    @routes.get("/ready")
    async def ready() -> Response:
        """200 while requests are accepted; 503 otherwise."""
        status = llm.state if llm.accepts or llm.state != "ready" else "asleep"
        return JSONResponse({"status": status}, 200 if llm.accepts else 503)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """The versions of this server, Python and torch."""
        return {"version": VERSION, "python": platform.python_version(), "torch": metadata.version("torch")}

    @routes.get("/server_info")
    async def server_info(request: Request) -> dict[str, Any]:
        """What should be noted beside a figure that was measured on this server."""
        go_on = llm.facts is not None and llm.recipe.server.most_resumed
        return _info(llm, names.name, described, request.state.client) | {
            "continuations": continuations() if go_on else None,
        }

    @routes.post("/abort/{request_id}")
    async def abort(request_id: str, request: Request) -> dict[str, Any]:
        """Abort a request by the id of its answer; a key finds only its own requests."""
        answers = llm.find(request_id, request.state.client.owner)
        if not answers:
            raise NotFound(f"there is no request {request_id[:128]!r}; it may have ended")
        for answer in answers:
            llm.abort(answer, CutOff("the request was aborted", "asked"))
        return {"id": request_id, "aborted": len(answers)}

    return routes


def metrics_router(llm: AsyncLLM, model: str) -> APIRouter:
    """Return a router with the routes of figures.

    They need a key where other routes do; Prometheus can send one.
    """
    routes = APIRouter()
    exposition = Exposition(llm.stats, model, lambda: llm.engine.pid)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """All metrics as text."""
        exposition.read()
        return Response(await asyncio.to_thread(exposition.text), headers={"content-type": CONTENT_TYPE})

    @routes.get("/experts")
    async def experts() -> dict[str, Any]:
        """How many tokens chose each expert of each layer since the engine started, for scripts.place."""
        if llm.stats.experts is None:
            raise NotFound("no experts are counted yet: set device.count_experts in the recipe, or ask again")
        return msgspec.structs.asdict(llm.stats.experts)

    return routes


PROFILED_STEPS, MOST_PROFILED_STEPS = 10, 1000


class ProfileBody(StrictBody):
    """The body of `POST /start_profile`."""

    num_steps: Annotated[int, Field(ge=1, le=MOST_PROFILED_STEPS)] | None = Field(
        None, description=f"steps of the engine to record; null: {PROFILED_STEPS}"
    )


def profile_router(llm: AsyncLLM, route: type[APIRoute], *, is_local: bool) -> APIRouter:
    """Return a router with the routes of traces; a recipe enables them by `server.profile`."""
    routes = APIRouter(route_class=route)

    def check_operator(request: Request) -> None:
        operators.check_operator(request, "record traces", is_local=is_local)

    @routes.post("/start_profile", response_class=Response)
    async def start(request: Request, body: ProfileBody | None = None) -> Response:
        """Begin to record the next steps."""
        check_operator(request)
        num_steps = (None if body is None else body.num_steps) or PROFILED_STEPS
        llm.start_profile(num_steps)
        return _as_json({"num_steps": num_steps, "folder": llm.recipe.server.profile})

    @routes.post("/stop_profile", response_class=Response)
    async def stop(request: Request) -> Response:
        """Wait for the trace, which ends now at the latest, and name its file."""
        check_operator(request)
        written = await llm.stop_profile()
        if written.error:
            raise RequestFailed(f"the trace could not be recorded: {written.error}")
        return _as_json({"path": written.path})

    return routes


def text_router(llm: AsyncLLM, names: ModelNames, route: type[APIRoute]) -> APIRouter:
    """Return a router for the tokenizer; answers are made and written in threads, since they may be long."""
    routes = APIRouter(route_class=route)
    most = llm.recipe.server.max_body_values

    @routes.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a prompt or a conversation."""
        text = _text(llm, body.model, names)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest(None, "exactly one of prompt and messages must be given")
        limits = {"max_model_len": llm.facts.max_tokens if llm.facts else None}
        return await llm.apart(lambda: _as_json(_tokens(text, body, most) | limits))

    @routes.post("/detokenize", response_class=Response)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of some tokens."""
        text = _text(llm, body.model, names)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < text.vocab_size:
            raise BadRequest("tokens", f"must be ids from 0 to {text.vocab_size - 1}")
        decode = partial(text.decode, body.tokens, skip_special_tokens=False)
        return await llm.apart(lambda: _as_json({"prompt": decode()}))

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What a remote tokenizer needs to know."""
        return _text(llm, None, names).describe()

    return routes


def _info(llm: AsyncLLM, model: str, described: dict[str, Any], client: Client) -> dict[str, Any]:
    """Return the recipe, the machine and the versions; what only an engine knows is null without one.

    A key sees only its own tenant among those that the recipe names.
    """
    facts, recipe = llm.facts, llm.recipe.described()
    weights = recipe["scheduler"]["tenant_weights"]
    if weights is not None and not client.names_tenants:
        own = {name: weight for name, weight in weights.items() if name == client.tenant}
        recipe["scheduler"]["tenant_weights"] = own
    return {
        "model": model,
        "version": VERSION,
        "recipe": recipe,
        "machine": described,
        "sampling_defaults": llm.sampling_defaults,  # those that the checkpoint's own files give
        "device": None if facts is None else facts.device,
        "num_slots": None if facts is None else facts.num_slots,
        "num_pages": None if facts is None else facts.num_pages - 1,  # page 0 is the null page
        "page_size": None if facts is None else facts.page_size,
        "weights_version": llm.orders.weights.version,
        "paused": llm.orders.is_paused,
        "asleep": llm.orders.is_asleep,
    }


def _text(llm: AsyncLLM, asked: str | None, names: ModelNames) -> Text:
    names.asked(asked)
    if llm.text is None:
        raise BadRequest(None, "this model has no tokenizer; it reads and writes token ids")
    return llm.text


def _as_json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _tokens(text: Text, body: TokenizeBody, most: int) -> dict[str, Any]:
    if body.messages is not None:
        named = {each.name for each in taken_by("tokenize")}
        options = body.model_dump(include=named, exclude_none=True)
        use = tool_use({"tools": body.tools})
        tools = () if use is None else use.tools
        ids = text.chat(body.messages, ChatOptions(tools=tools, **options))
    else:
        if body.tools:
            raise BadRequest("tools", "needs messages; a prompt goes through no chat template")
        assert body.prompt is not None
        ids = text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if len(ids) > most:
        raise BadRequest(
            "prompt" if body.messages is None else "messages",
            f"has {len(ids)} tokens; a response may hold {most} (server.max_body_values)",
            value=len(ids),
            limit=most,
            fix="send less at a time",
        )
    names = {"token_strs": [_name(text, each) for each in ids]} if body.return_token_strs else {}
    return {"tokens": ids, "count": len(ids), **names}


def _name(text: Text, token: int) -> str:
    return text.token_bytes(token, skip_special_tokens=False).decode("utf-8", "replace")
