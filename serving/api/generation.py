"""Send requests to the engine, and choose what writes their answers: for the client, or for its router.

This is what all forms of an answer share. A request which the server or the engine refuses, or which finds no
engine, gets a status code.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from borders.field_table import MOST_SAMPLES
from borders.refusal import BadRequest
from continuous_batching.routing.splitting import PROMPT_REPLICA_HEADER
from serving.answers.answers import AnswerStream
from serving.api.api_keys import Client
from serving.api.errors import OtherModel
from serving.api.frame_writer import FrameWriter
from serving.api.model_names import ModelNames
from serving.api.pieces import Turns
from serving.api.schemas import RequestBody, SamplingBody
from serving.api.writer import AnswerWriter, ResponseForm, WholeForm
from serving.async_llm import PROMPT_REPLICA, AsyncLLM, why_not_resumed
from serving.continuation import NOT_RESUMED_HEADER, AnswerBegun, Continuation
from serving.grammars.structured_output import FIELDS as FORMS
from serving.grammars.structured_output import form_notes
from serving.tools.definitions import ToolUse, tool_use

_ONLY_HTTP = {"model", "stream", "user", "service_tier"}
_TENANT_HEADER = "x-tenant"
SCHEMA_HEADER = "x-schema-notes"  # names constraints of a schema that the answer need not meet
MOST_NOTES = 8  # constraints that the header names
EFFORT_HEADER = "x-reasoning-effort"  # says that a request's reasoning_effort changed nothing


@contextlib.contextmanager
def fields_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Make refusals inside this context name the field as the client sent it, not by the engine's name."""
    try:
        yield
    except BadRequest as bad:
        if bad.field is None or bad.field not in names:
            raise
        raise bad.of_field(names[bad.field]) from None


class Generation:
    """Sends requests to the engine; every answer carries `system_fingerprint`.

    Answers may go on at servers with the same `continuations()`, which is such a fingerprint, too.
    """

    def __init__(
        self, llm: AsyncLLM, names: ModelNames, continuations: Callable[[], str], turns: Turns
    ) -> None:
        self.llm = llm
        self._names = names
        self._continuations = continuations
        self._turns = turns

    def name(self, mark: str, request: Request) -> str:
        """Return the id of the answer to a request: a new one, or that of an answer that goes on here."""
        known = _known(request)
        return f"{mark}{uuid.uuid4().hex}" if known is None else known.begun.group

    def fields(self, body: RequestBody, request: Request) -> dict[str, Any]:
        """Return the fields that `parse_request` reads besides the prompt.

        Raises NotFound for another model.
        """
        self._names.asked(body.model)
        fields = body.model_dump(exclude=_ONLY_HTTP | body.apart, exclude_none=True)
        client: Client = request.state.client
        tenant = client.tenant_for(request.headers.get(_TENANT_HEADER) or body.tenant, body.user)
        if tenant:
            fields["tenant"] = tenant
        if priority := client.priority_for(body.priority):
            fields["priority"] = priority
        fields["cache_salt"] = client.salted(body.cache_salt or "")
        if replica := request.headers.get(PROMPT_REPLICA_HEADER):
            if replica not in self.llm.recipe.server.prompt_replicas:
                problem = "is not one of server.prompt_replicas"
                raise BadRequest(PROMPT_REPLICA_HEADER, problem, value=replica, fix="leave it out")
            fields[PROMPT_REPLICA] = replica
        if body.model is not None and self.llm.adapters.knows(body.model):
            fields["adapter"] = body.model
        return fields

    def _tools_and_notes(self, fields: Mapping[str, Any]) -> tuple[ToolUse | None, dict[str, str]]:
        """Return the tools, and the headers that name what was asked for and need not be met."""
        notes: dict[str, str] = {}
        effort, text = fields.get("reasoning_effort"), self.llm.text
        has_tools = bool(fields.get("tools"))
        if text is not None and effort is not None and text.ignores_effort(effort, has_tools=has_tools):
            notes[EFFORT_HEADER] = "no effect: the chat template does not know it"
        use = tool_use(fields)
        form = None if text is None else text.tool_format
        unmet = [*dict.fromkeys(form_notes(fields) + (() if use is None else use.notes_in(form)))]
        if unmet:
            more = ["and more"] * (len(unmet) > MOST_NOTES)
            notes[SCHEMA_HEADER] = "not enforced: " + "; ".join([*unmet[:MOST_NOTES], *more])
        return use, notes

    def check_number(self, num_prompts: int, samples_each: int | None = None, *, subject: str) -> None:
        """Raise BadRequest for more samples than the server ever accepts at once; `subject` asks for them."""
        limit = self.llm.recipe.server.max_requests
        each = max(1, samples_each or 1)
        num_samples = num_prompts * (
            each if each <= MOST_SAMPLES else 1
        )  # larger values of n or best_of are refused later
        if num_samples > limit:
            raise BadRequest(
                None,
                f"asked for {num_samples} samples at once; the server takes {limit} (server.max_requests)",
                value=num_samples,
                limit=limit,
                fix="send fewer at a time",
                subject=subject,
            )

    async def ask(
        self,
        requests: Sequence[dict[str, Any]],
        group: str,
        request: Request,
        *,
        fill: bool = False,
        shorten: bool = False,
    ) -> list[AnswerStream]:
        """Send all requests to the engine, or none; `group` is the id of the single response to `request`.

        Apart from their prompts, all have the same fields; `AsyncLLM.ask` says what `fill` and `shorten` are.
        The tools are left in `request.state.tools`: to prepare them again would hold up the event loop.
        """
        fields = requests[0]
        if (known := _known(request)) is not None:
            self._check_known(known, requests)
        is_short = not any(fields.get(name) for name in (*FORMS, "tools"))
        read = partial(self._tools_and_notes, fields)
        request.state.tools, request.state.notes = await self.llm.apart(read, at_once=is_short)
        owner = request.state.client.owner
        options = {"fill": fill, "shorten": shorten, "seeds": _tells(request)}
        return await self.llm.ask(requests, **options, group=group, owner=owner, known=known)

    def head(self, body: SamplingBody) -> dict[str, str]:
        """Return the fields that every answer to a request contains."""
        fingerprint = self.llm.orders.weights.fingerprint
        head = {"model": self._names.asked(body.model), "system_fingerprint": fingerprint}
        return head if body.service_tier is None else head | {"service_tier": "default"}

    async def respond(
        self, answers: Sequence[AnswerStream], form: ResponseForm, request: Request, *, is_streamed: bool
    ) -> Response:
        """Return the response to one request, whole or as a stream of events."""
        writer = AnswerWriter(self.llm, self._turns, answers)
        if _tells(request):
            begun = self._begun(answers[0], is_streamed=is_streamed)
            if why := why_not_resumed([each.request for each in answers]) or _too_long(begun):
                request.state.notes[NOT_RESUMED_HEADER] = why
            else:
                writer = FrameWriter(self.llm, self._turns, answers[0], begun)
        return await writer.stream(request, form) if is_streamed else await writer.whole(request, form)

    def _begun(self, answer: AnswerStream, *, is_streamed: bool) -> AnswerBegun:
        request, section = answer.request, self.llm.recipe.server
        return AnswerBegun(
            group=answer.group,
            created_s=answer.created_s,
            fingerprint=self._continuations(),
            adapter=self.llm.adapters.digest_of(request),
            seed=request.params.seed or 0,
            max_tokens=request.params.max_tokens,
            prompt_token_ids=request.prompt.astype("<i4").tobytes(),
            most_resumed=section.most_resumed,
            most_tokens=section.resume_max_tokens,
            is_stream=is_streamed,
        )

    def _check_known(self, known: Continuation, requests: Sequence[Mapping[str, Any]]) -> None:
        """Raise what tells the router that an answer cannot go on here, or was never begun so."""
        if len(requests) > 1:
            raise BadRequest("known_token_ids", "go on in one prompt", value=len(requests), limit=1)
        name = requests[0].get("adapter")
        digest = "" if name is None else self.llm.adapters.find(name).files.digest
        if digest != known.begun.adapter:
            raise OtherModel(f"the answer was begun with another adapter than {name!r} is here")

    async def respond_whole(
        self, answers: Sequence[AnswerStream], form: WholeForm, request: Request
    ) -> Response:
        """Return the response to a request whose answers are never streamed."""
        return await AnswerWriter(self.llm, self._turns, answers).whole(request, form)

    def asked(self, model: str | None) -> str:
        """Return the model name that a response carries; raises NotFound for another model."""
        return self._names.asked(model)


def prompts_of(given: str | list[Any]) -> list[dict[str, Any]]:
    """Return the prompts as fields of requests, each a text or token ids."""
    if not given and not isinstance(given, str):
        raise BadRequest("prompt", "is empty; it must hold at least one token")
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]


def _known(request: Request) -> Continuation | None:
    """Return what is known of the answer to a request, where it was begun elsewhere."""
    known: Continuation | None = getattr(request.state, "continuation", None)
    return known


def _tells(request: Request) -> bool:
    """Return whether a router wants to know the answer's tokens."""
    return bool(getattr(request.state, "tells_tokens", False))


def _too_long(begun: AnswerBegun) -> str:
    num_prompt = len(begun.prompt_token_ids) // 4
    if num_prompt < begun.most_tokens:
        return ""
    return f"its prompt has {num_prompt} tokens; server.resume_max_tokens is {begun.most_tokens}"
