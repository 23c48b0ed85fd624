"""Assemble the server's application from its routes, its limits on bodies and its access control."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from borders.version import VERSION
from serving import fingerprint
from serving.api import batches as batch_routes
from serving.api import errors, files, live_page, messages, model_names, operations
from serving.api.access import AccessControl, BodyMemory, Door, HeadAndOptions, bounded_route
from serving.api.api_keys import ApiKeys
from serving.api.batch_runner import Batches
from serving.api.chat import ChatRoute
from serving.api.completion import CompletionRoute
from serving.api.continuations import Continuations
from serving.api.embeddings import EmbeddingsRoute
from serving.api.generation import Generation
from serving.api.live_page import LivePage
from serving.api.messages import MessagesRoutes
from serving.api.model_names import ModelNames
from serving.api.openapi import DescribedAPI
from serving.api.pieces import Turns
from serving.api.responses import ResponsesRoute
from serving.api.scores import ScoreRoutes
from serving.async_llm import AsyncLLM
from serving.continuation import MOST_KNOWN_BYTES, PATH
from serving.failures import Overloaded


def application(
    llm: AsyncLLM,
    model: str,
    keys: ApiKeys,
    cors_origins: Sequence[str] = (),
    *,
    is_local: bool,
    batches: Batches | None = None,
    live: LivePage | None = None,
) -> ASGIApp:
    """Return the server's application behind its access control.

    `model` is the name under which the model is served; see AccessControl for `is_local`. Pages of
    `cors_origins` may send requests from a browser; "*" stands for all origins. Where `batches` is given, its
    routes are served; `Batches.run` runs the batches. `live` has a history if it has begun before.
    """
    title = "Continuous batching"
    app = DescribedAPI(title=title, version=VERSION, redirect_slashes=False, docs_url=None, redoc_url=None)
    errors.install(app)
    names = ModelNames(model, llm.recipe.server.model_names, llm.adapters)
    turns = Turns()
    continuations = _continuations(llm)
    generation = Generation(llm, names, continuations, turns)
    route = bounded_route(llm.recipe.server.max_body_values, turns)
    app.router.route_class = route
    answers: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/completions": CompletionRoute(generation).complete,
        "/v1/chat/completions": ChatRoute(generation).chat,
        "/v1/responses": ResponsesRoute(generation).respond,
        "/v1/embeddings": EmbeddingsRoute(generation).embed,
    }
    others = MessagesRoutes(generation).by_path() | ScoreRoutes(generation).by_path()
    for path, answer in (answers | others).items():
        app.add_api_route(path, answer, methods=["POST"], response_class=Response)
    for routes in operations.routers(llm, names, model, route, continuations, is_local=is_local):
        app.include_router(routes)
    app.include_router(model_names.router(llm, names, route))
    app.include_router(live_page.router(live or LivePage(llm)))
    max_body_bytes, most_bytes_of = int(llm.recipe.server.max_body_mib * 2**20), {}
    if batches is not None:
        app.include_router(files.files_router(batches, route))
        app.include_router(batch_routes.batches_router(batches, tuple(answers), route))
        most_bytes_of[files.PATH] = int(llm.recipe.server.max_batch_file_mib * 2**20)
        batches.app = app
    most_bytes = int(llm.recipe.server.max_bodies_mib * 2**20)
    memory = BodyMemory(max(most_bytes, max_body_bytes, *most_bytes_of.values()))
    most_bytes_of[PATH] = max_body_bytes + MOST_KNOWN_BYTES
    guarded = AccessControl(
        Continuations(HeadAndOptions(app), keys, llm.recipe.server, continuations, is_local=is_local),
        keys,
        max_body_bytes,
        memory,
        llm.stats.responded,
        is_local=is_local,
        most_bytes_of=most_bytes_of,
        door=AnswersDoor(llm, (*answers, messages.PATH, PATH)),
    )
    return _open_to(cors_origins, guarded) if cors_origins else guarded


def _continuations(llm: AsyncLLM) -> Callable[[], str]:
    """Return what returns the fingerprint of the servers at which answers may go on; it reads no file."""
    by_factors = fingerprint.of_continuations(llm.recipe, VERSION)
    return lambda: by_factors[llm.engine.long_factors]


class AnswersDoor(Door):
    """Gives each request for an answer a place among `server.max_requests`, by its head."""

    def __init__(self, llm: AsyncLLM, paths: Sequence[str]) -> None:
        self._llm = llm
        self._paths = frozenset(paths)

    def enter(self, scope: Scope) -> ASGIApp | None:
        """Return the refusal of a request, if there is no room for one more sample."""
        if scope["method"] != "POST" or scope["path"] not in self._paths:
            return None
        try:
            scope["state"]["place"] = self._llm.enter()
        except Overloaded as failure:
            return errors.response_of(failure)
        return None

    def leave(self, scope: Scope) -> None:
        """Give back the place of a request that has not reached the engine."""
        if "place" in scope["state"]:
            scope["state"]["place"].leave()


def _open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """Answer CORS requests before the access control, since a browser's preflight request has no key."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after", "x-reasoning-effort", "x-schema-notes"],
    )
