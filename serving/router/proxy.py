"""Pass a request to a replica of its model and its answer back, also when the replica is lost.

If nothing of the answer has been sent but signs of life, a request goes to another replica when the first is
lost or refuses it. An answer that has begun goes on at another replica, if its tokens are known and there is
one that would have given it, too. Otherwise its client is told that it ends early: a stream by an error event
in place of its end, any other answer by a connection that breaks. No request is ever sent to two
replicas at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from borders.field_types import LONGEST_NAME
from borders.refusal import BadRequest
from continuous_batching.routing.routing import RoutedPrompt, Routing, Sent
from continuous_batching.routing.splitting import PROMPT_REPLICA_HEADER, PromptPlace, Splitting
from serving.api.access import whole_body
from serving.api.api_keys import ANYBODY, Client
from serving.api.errors import error_response
from serving.api.streamed import DONE
from serving.continuation import (
    NOT_RESUMED_HEADER,
    PATH,
    RESUMED_PATHS,
    ROUTER_KEY_HEADER,
    AnswerBegun,
)
from serving.failures import CutOff, Failure, ShutDown
from serving.router.fair_turns import ModelTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.framed_answer import FramedAnswer, is_framed, loss_event, read_out, why_not_resumed
from serving.router.models import RETRY_S, FleetModels
from serving.router.prompts import Prompts, RoutedBody
from serving.router.replicas import FleetReplica
from serving.router.reply import (
    MESSAGES,
    REFUSED,
    WITH_DONE,
    Refusal,
    Reply,
    before_loss,
    begun_with,
    first_data,
    has_event,
    is_event_stream,
    own_error,
    refuses,
    tells_of_loss,
    whole_events,
)
from serving.router.resuming import WAIT_S, Interrupted, KnownAnswer, KnownAnswers
from serving.router.upstream import HeaderLines, Lost, UpstreamAnswer

log = logging.getLogger("route")

SESSION_HEADER, TENANT_HEADER = b"x-session-id", b"x-tenant"
AGAIN_S = 0.05  # interval at which the request of a disconnected client is cancelled again
_ENDS = (b"data: [DONE]", b"data:[DONE]")
_GENERATIONS = (*WITH_DONE, "/v1/responses", MESSAGES)
_LONG_BYTES = 2**14  # a body of this size or more is read in a thread
_MOST_WHOLE_BYTES = 2**23  # most bytes of an answer that is held back until it is complete
_OWN = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"expect", b"te"}
_UNREADABLE = b"accept-encoding"  # the end of a compressed stream could not be told from a loss
_PROMPT_REPLICA, _ROUTER_KEY = PROMPT_REPLICA_HEADER.encode(), ROUTER_KEY_HEADER.encode()
_NOT_PASSED_ON = frozenset({*_OWN, _UNREADABLE, b"x-request-id", _PROMPT_REPLICA, _ROUTER_KEY})
_NOT_SENT_BACK = frozenset(
    {*_OWN, b"x-request-id", b"request-id", b"server", b"date", NOT_RESUMED_HEADER.encode()}
)
_LOOK_S = 0.25  # interval at which an answer that waits to go on looks for a replica
_ONCE = ("/v1/files", "/v1/batches")  # requests posted to these paths are never repeated
_ABORT = "/abort/"  # followed by a request's id, which only the replica that runs it knows
_DONE, _UNKNOWN, _UNAVAILABLE = 200, 404, 503
_ELSEWHERE = (*REFUSED, 404, 409)  # statuses after which another replica may continue an answer
_ENDED = "its engine ended"
_NOTHING_ASKED, _NO_PROMPT = RoutedBody(), RoutedPrompt(0)


@dataclass(slots=True)
class _Routed:
    """A request, as far as it decides where it goes; `model` is what it names if it `is_bound` to one."""

    scope: Scope
    body: bytes
    is_bound: bool = False
    model: str | None = None
    prompt: RoutedPrompt = _NO_PROMPT
    session: str = ""


class Proxy:
    """Passes requests on; `prompts` reads their prompts, and `turns` decides when each is sent.

    A client whose stream is silent for `keep_alive_s` gets a sign of life; 0: it gets none but its replica's.
    `answers` bounds what is known of answers, of which replicas tell if they accept the router's `key`.
    """

    def __init__(
        self,
        routing: Routing,
        replicas: list[FleetReplica],
        prompts: Prompts,
        turns: ModelTurns,
        figures: FleetFigures,
        splitting: Splitting | None = None,
        models: FleetModels | None = None,
        keep_alive_s: float = 0.0,
        answers: KnownAnswers | None = None,
        key: bytes = b"",
    ) -> None:
        self._routing = routing
        self._replicas = replicas
        self._prompts = prompts
        self._turns = turns
        self._figures = figures
        self._splitting = splitting or Splitting(routing)
        self._models = models or FleetModels()
        self._keep_alive_s = keep_alive_s
        self._answers = answers or KnownAnswers()
        self._shown_key = (b"Bearer " + key).strip()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = await whole_body(receive)
        if body is None:
            return
        if scope["method"] == "POST" and scope["path"].startswith(_ABORT):
            await self._abort(scope, send, body)
            return
        watch = ClientWatch(scope.setdefault("state", {}))
        try:
            await self._in_turn(scope, send, body, watch)
        except asyncio.CancelledError:
            if not watch.is_gone:
                raise
        finally:
            watch.end()

    async def _in_turn(self, scope: Scope, send: Send, body: bytes, watch: ClientWatch) -> None:
        """Read what a request asks for, and send it on when its tenant has its turn."""
        is_bound = scope["method"] == "POST"  # what is posted is for a model, or for the server of one
        try:
            asked = self._prompts.asked(body) if is_bound else _NOTHING_ASKED
        except HTTPException as refusal:
            error = own_error(scope["path"], refusal.status_code, refusal.detail)
            await _send_whole(send, refusal.status_code, [(b"content-type", b"application/json")], error)
            return
        is_stream = bool(asked.stream) and scope["path"] in _GENERATIONS
        cut_off = partial(_cut_off, scope)
        reply = Reply(send, scope["path"], self._keep_alive_s, cut_off, is_stream=is_stream)
        try:
            if is_bound:
                self._models.others_than(asked.model)  # raises what would be in vain to wait for
            await self._take_turn(_Routed(scope, body, is_bound, asked.model), asked, reply)
        except BadRequest as bad:
            await reply.error(400, str(bad), bad.field)
        except Failure as failure:
            await reply.error(failure.status, str(failure), retry_after_s=failure.retry_after_s)
        except asyncio.CancelledError:
            if not watch.is_gone and reply.can_fail:  # the router ends
                end = ShutDown()
                await reply.error(end.status, str(end), retry_after_s=end.retry_after_s)
            raise
        finally:
            await reply.end()

    async def _take_turn(self, routed: _Routed, asked: RoutedBody, reply: Reply) -> None:
        """Wait for a turn among the requests for the same model, and send the request on."""
        client: Client = routed.scope["state"].get("client") or ANYBODY
        turn_of = self._models.turn_of(routed.model)
        if routed.is_bound and routed.scope["path"] in _GENERATIONS:
            routed.prompt = await self._read(routed, asked, client)
        headers = dict(routed.scope["headers"])
        named = headers.get(TENANT_HEADER, b"").decode("latin-1") or asked.tenant
        tenant = (named or asked.user or client.tenant) if client.names_tenants else client.tenant
        if value := headers.get(SESSION_HEADER):
            of_model = "" if self._models.is_one else turn_of  # a session has a replica of each model
            # Thousands of sessions and tenants are remembered, and long names of them would fill the memory
            name = hashlib.sha256(value).hexdigest() if len(value) > LONGEST_NAME else value.decode("latin-1")
            routed.session = f"{client.owner}\0{of_model}\0{name}"
        came_s, turns = time.monotonic(), self._turns.of(turn_of)
        await turns.enter(tenant[:LONGEST_NAME], routed.prompt.num_tokens)
        try:
            self._figures.waited(time.monotonic() - came_s)
            known = KnownAnswer(self._answers, routed.scope["path"], routed.body, _owner(routed.scope))
            try:
                await self._send_on(routed, reply, known)
            finally:
                known.forget()
        finally:
            turns.leave()

    async def _abort(self, scope: Scope, send: Send, body: bytes) -> None:
        """Ask all replicas at once to abort a request; one that is to go on is at none, and ends here.

        So does one whose replica is lost before it has said that it aborts it.

        The first replica that aborts it answers; otherwise one that refuses for any reason but not knowing
        the request; otherwise one that does not know it.
        """
        headers, path = _passed_on(scope), scope["raw_path"].decode("latin-1")
        group = scope["path"].removeprefix(_ABORT)
        known = self._answers.abort(group, _owner(scope))
        has_waited = any(each.is_interrupted for each in known)

        async def ask(replica: FleetReplica) -> tuple[int, HeaderLines, bytes]:
            answer = await replica.server.ask("POST", path, headers, body)
            try:
                return answer.status, answer.headers, await _whole(answer)
            finally:
                replica.server.done(answer)

        there = [each for each in self._replicas if each.state not in ("lost", "gone")]
        asking = [asyncio.ensure_future(ask(each)) for each in there]
        said: tuple[int, HeaderLines, bytes] | None = None
        try:
            for coming in asyncio.as_completed(asking):
                with suppress(Lost):  # a lost replica's requests are lost with it, and this one ends here
                    answer = await coming
                    if said is None or said[0] == _UNKNOWN or answer[0] == _DONE:
                        said = answer
                    if answer[0] == _DONE:
                        break
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        ends_here = has_waited or any(each.is_interrupted or each.is_told_aborted for each in known)
        if ends_here and (said is None or said[0] != _DONE):
            done = msgspec.json.encode({"id": group, "aborted": 1})
            await _send_whole(send, _DONE, [(b"content-type", b"application/json")], done)
        elif said is not None:
            await _send_whole(send, *said)
        else:
            why = "no replica could be reached; send the request again"
            await error_response(503, why, retry_after_s=RETRY_S)(scope, _nothing, send)

    async def _read(self, routed: _Routed, asked: RoutedBody, client: Client) -> RoutedPrompt:
        is_of_recipe = self._models.is_of_recipe(routed.model)
        kind = {"is_of_recipe": is_of_recipe, "is_message": routed.scope["path"] == MESSAGES}
        read = partial(self._prompts.read, routed.body, asked, client, **kind)
        is_long = len(routed.body) >= _LONG_BYTES and self._prompts.page_size
        return await asyncio.to_thread(read) if is_long else read()

    async def _send_on(self, routed: _Routed, reply: Reply, known: KnownAnswer) -> None:
        """Send a request to one replica after the other, until one has answered it.

        Who was unavailable is asked once more when another is, too: an engine that has died is soon back.
        """
        scope, prompt = routed.scope, routed.prompt
        is_once = scope["method"] == "POST" and scope["path"].startswith(_ONCE)
        tried: list[int] = []
        asked_again: set[int] = set()
        refusal: Refusal | None = None  # the last replica's
        while (sent := await self._next(routed, tried, known)) is not None:
            replica = self._replicas[sent.replica]
            split = self._splitting.choose(prompt, sent, time.monotonic(), self._others_than(routed))
            self._figures.sent(replica, sent, prompt, split, is_again=bool(tried))
            tried.append(sent.replica)
            counted = _Counted(self._routing, replica, sent, split.place)
            try:
                refusal = await self._answered(routed, reply, counted, split.place, known, is_once=is_once)
                if refusal is None:
                    return
                if refusal.is_loss:
                    replica.num_lost += 1
                    if known.lose(is_orderly=False):
                        await self._tell_unanswered(reply, replica, Lost(_ENDED), known, is_once=is_once)
                        return
                if refusal.status == _UNAVAILABLE:
                    again = set(tried[:-1]) - asked_again
                    asked_again |= again
                    tried = [each for each in tried if each not in again]
                if refusal.is_of_known:
                    refusal = None  # it is none of the request, which may begin again
                    if not known.is_continued:
                        tried.pop()  # also where that was refused
            except Interrupted as lost:
                replica.num_lost += 1
                tried, refusal = [sent.replica], None
                log.warning("%s: %s; the answer goes on elsewhere", replica.url, lost)
            except Lost as lost:
                replica.num_lost += 1
                if lost.may_be_done and (known.lose(is_orderly=lost.is_orderly) or is_once):
                    await self._tell_unanswered(reply, replica, lost, known, is_once=is_once)
                    return
                log.warning("%s: %s; nothing was answered, so it goes elsewhere", replica.url, lost)
            finally:
                counted.end()
        await self._tell_end(routed, reply, known, refusal)

    async def _answered(
        self,
        routed: _Routed,
        reply: Reply,
        counted: _Counted,
        place: PromptPlace | None,
        known: KnownAnswer,
        *,
        is_once: bool,
    ) -> Refusal | None:
        """Ask a replica and send its answer on, or return that it refuses; raises Lost."""
        server = counted.replica.server
        answer = await self._ask(routed, counted.replica, place, known, is_once=is_once)
        try:
            is_refused = answer.status in REFUSED or (answer.status == _UNKNOWN and routed.model is not None)
            is_of_known = (
                known.is_continued and not is_framed(answer.headers) and answer.status != CutOff.status
            )
            if is_of_known and answer.status not in _ELSEWHERE:
                known.be_refused(answer.status)
            if is_refused or is_of_known:
                body = await _whole(answer)
                whole = partial(reply.whole, answer.status, _kept(answer.headers), body)
                return Refusal(answer.status, whole, tells_of_loss(body), is_of_known)
            return await self._forward(routed, reply, answer, counted, known)
        finally:
            server.done(answer)

    async def _next(self, routed: _Routed, tried: list[int], known: KnownAnswer) -> Sent | None:
        """Choose the next replica; for an answer that is to go on, wait for one that can continue it.

        One that may begin again does so where another replica is ready, and none that could continue it, or
        none that has done so in this time.
        """
        if known.is_aborted:
            return None
        if known.waits_until_s is None:
            return self._sent(routed, tried)
        assert known.begun is not None, "an answer was interrupted before it began"
        like, until_s = known.begun.fingerprint, known.waits_until_s
        while not (known.why_not or known.is_aborted):
            others = [each.number for each in self._replicas if each.continuations != like]
            but = others if known.is_continued else []  # An answer without a token has nothing to continue
            sent = self._sent(routed, [*tried, *but], waits=True)
            is_late = time.monotonic() >= until_s
            unlike = [*others, *self._others_than(routed, waits=True)]
            if sent is None and known.may_begin_again and (is_late or not self._is_open_but(unlike)):
                tried.clear()  # A replica that did not continue it may begin it
                if (sent := self._sent(routed, tried, waits=True)) is not None:
                    known.begin_again()
            if sent is not None or is_late:
                return sent
            await asyncio.sleep(_LOOK_S)
            tried.clear()
        return None

    def _is_open_but(self, others: Sequence[int]) -> bool:
        """Return whether a replica that is none of these gets requests."""
        is_open = self._routing.is_open
        return any(is_open[each.number] for each in self._replicas if each.number not in others)

    async def _ask(
        self,
        routed: _Routed,
        replica: FleetReplica,
        place: PromptPlace | None,
        known: KnownAnswer,
        *,
        is_once: bool,
    ) -> UpstreamAnswer:
        """Send a request to a replica, and return its answer once there is a head; raises Lost."""
        scope = routed.scope
        raw, headers = scope["raw_path"].decode("latin-1"), _passed_on(scope)
        path = f"{raw}?{query.decode('latin-1')}" if (query := scope["query_string"]) else raw
        body = routed.body
        if place is not None:
            headers.append((_PROMPT_REPLICA, place.endpoint.encode()))
        if replica.continuations is not None and scope["path"] in RESUMED_PATHS:
            headers.append((_ROUTER_KEY, self._shown_key))
        if known.is_continued:
            path, body = PATH, known.continuation()
        return await replica.server.ask(scope["method"], path, headers, body, is_once=is_once)

    async def _tell_end(
        self, routed: _Routed, reply: Reply, known: KnownAnswer, refusal: Refusal | None
    ) -> None:
        """Tell a client why no replica answers it, or goes on with its answer."""
        if known.is_aborted:
            await _tell_aborted(reply, known)
        elif known.is_interrupted and known.is_sent:
            self._figures.cut_off()
            why = f"no replica like it took the answer within {WAIT_S:g} s"
            await self._tell_loss(routed, reply, "" if known.why_not else why, known.why_not)
        elif refusal is not None:
            self._figures.refused()
            await refusal.pass_on()
        else:
            self._figures.refused()
            of_model = f" of {routed.model!r}" if routed.model is not None and not self._models.is_one else ""
            why = f"no replica{of_model} can take a request now; send it again"
            await reply.error(503, why, retry_after_s=RETRY_S)

    async def _tell_unanswered(
        self, reply: Reply, replica: FleetReplica, lost: Lost, known: KnownAnswer, *, is_once: bool
    ) -> None:
        log.warning("%s: %s; its client is told", replica.url, lost)
        why = f"the replica was lost ({lost}), and may have done this or not: check, or send it again"
        if not is_once:
            most = known.most_losses
            why = f"more than {most} replicas were lost ({lost}), perhaps because of this request"
        await reply.error(502, why, code="replica_lost")

    def _others_than(self, routed: _Routed, *, waits: bool = False) -> Sequence[int]:
        """Return the replicas that lack what a request names: its model, or its adapter.

        Where an answer `waits` to go on, that can be all of them: one that has it may come yet.
        """
        try:
            return self._models.others_than(routed.model) if routed.is_bound else ()
        except (BadRequest, Failure):
            if not waits:
                raise
            return [each.number for each in self._replicas]

    def _sent(self, routed: _Routed, tried: list[int], *, waits: bool = False) -> Sent | None:
        """Choose a replica of the model; one that computes prompts for others is the last resort."""
        others, now_s = self._others_than(routed, waits=waits), time.monotonic()
        apart, but = self._splitting.not_for_answers, [*others, *tried]
        sent = self._routing.send(routed.prompt, now_s, routed.session, [*but, *apart]) if apart else None
        return sent or self._routing.send(routed.prompt, now_s, routed.session, but)

    async def _forward(
        self, routed: _Routed, reply: Reply, answer: UpstreamAnswer, counted: _Counted, known: KnownAnswer
    ) -> Refusal | None:
        """Send an answer on, or return that it is a refusal.

        Raises Lost only where nothing of it was sent yet but signs of life.
        """
        if is_framed(answer.headers):
            return await self._forward_framed(routed, reply, answer, counted, known)
        if not is_event_stream(answer.headers):
            counted.begin()
            await self._forward_whole(routed.scope, reply, answer, counted.replica)
            return None
        path, wants_done = routed.scope["path"], answer.status == 200 and routed.scope["path"] in WITH_DONE
        await reply.head(answer.status, _kept(answer.headers))
        unsent = await self._first_event(routed, reply, answer)
        if refuses(unsent):
            event = unsent if not wants_done else _with_done(unsent)
            return Refusal(0, partial(reply.part, event, more=False), tells_of_loss(first_data(unsent)))
        counted.begin()
        sent, held = b"", b""  # the last bytes that were sent, and the beginning of an event
        try:
            while unsent and not answer.is_read:  # the end is sent with the last bytes: the client wakes once
                ready, held = whole_events(held + unsent)
                unsent = b""
                told = before_loss(ready)
                if told:
                    await reply.part(told)
                    sent = told[-64:]
                if len(told) < len(ready):
                    raise Lost(_ENDED)
                unsent = await answer.next()
            ready = held + unsent
            unsent = before_loss(ready)
            if len(unsent) < len(ready):
                raise Lost(_ENDED)
            if wants_done and not (sent + unsent[-64:]).rstrip().endswith(_ENDS):
                raise Lost("the stream ended before its end")
        except Lost as lost:
            self._record_loss(counted.replica, lost)
            unsent, _ = whole_events(unsent)
            unsent += loss_event(path, str(lost), why_not_resumed(answer.headers))
        await reply.part(unsent, more=False)
        return None

    async def _forward_framed(
        self, routed: _Routed, reply: Reply, answer: UpstreamAnswer, counted: _Counted, known: KnownAnswer
    ) -> Refusal | None:
        """Send on an answer in frames, as `_forward` does.

        Raises Interrupted where it can go on elsewhere.
        """
        framed = FramedAnswer(reply, known, answer, _kept(answer.headers))
        try:
            while True:
                for frame in await framed.read():
                    if isinstance(frame, list):
                        counted.begin()
                        framed.grow(frame)
                    elif isinstance(frame, AnswerBegun):
                        if known.is_aborted:  # Its replica did not know it yet when that was asked for
                            await _tell_aborted(reply, known)
                            return None
                        if known.goes_on():
                            self._figures.resumed()
                        await framed.begin(frame)
                    elif frame.is_lost:
                        why = "its server ended" if frame.is_orderly else _ENDED
                        raise Lost(why, is_orderly=frame.is_orderly)
                    else:
                        refusal = await framed.end(frame)
                        if not (framed.is_long and frame.has_more):
                            await read_out(answer)
                            return refusal
                await framed.send()
        except Lost as lost:
            has_stalled = framed.has_stalled  # its replica was left with what the client does not read
            await framed.send()  # An answer that goes on elsewhere has reached its client so far.
            if has_stalled:
                known.give_up("its client read too slowly")
            known.check_resumable(is_orderly=lost.is_orderly)
            if known.can_go_on:
                known.interrupt(is_orderly=lost.is_orderly)
                raise Interrupted(str(lost)) from lost
            if known.is_sent:
                self._record_loss(counted.replica, lost, is_its_own=not has_stalled)
                if framed.is_long:  # an event would be bytes of its JSON
                    _cut_off(routed.scope)
                else:
                    await self._tell_loss(routed, reply, str(lost), known.why_not)
                return None
            known.begin_again()
            raise

    async def _tell_loss(self, routed: _Routed, reply: Reply, lost: str, why_not: str = "") -> None:
        await reply.part(loss_event(routed.scope["path"], lost, why_not), more=False)

    async def _first_event(self, routed: _Routed, reply: Reply, answer: UpstreamAnswer) -> bytes:
        """Pass signs of life on until there is an event, and return it and what follows it; raises Lost."""
        received = b""
        while not has_event(received) and (part := await answer.next()):
            signs, received = begun_with(received + part)
            if signs:
                await reply.part(signs)
        if not has_event(received) and routed.scope["path"] in _GENERATIONS:
            raise Lost("the stream ended before its first event")
        return received

    async def _forward_whole(
        self, scope: Scope, reply: Reply, answer: UpstreamAnswer, replica: FleetReplica
    ) -> None:
        """Send on an answer that is no event stream.

        It is held back until it is complete, unless it is very long.
        """
        parts, num_bytes = [], 0
        while num_bytes <= _MOST_WHOLE_BYTES and (part := await answer.next()):
            parts.append(part)
            num_bytes += len(part)
        if num_bytes <= _MOST_WHOLE_BYTES:
            await reply.whole(answer.status, _kept(answer.headers), b"".join(parts))
            return
        if reply.has_head:
            raise Lost(
                f"it answered a stream's request with more than {_MOST_WHOLE_BYTES} bytes that are none"
            )
        await reply.head(answer.status, _kept(answer.headers))
        part = b"".join(parts)
        try:
            while part:
                await reply.part(part)
                part = await answer.next()
        except Lost as lost:
            self._record_loss(replica, lost)
            _cut_off(scope)
            return
        await reply.part(b"", more=False)

    def _record_loss(self, replica: FleetReplica, lost: Lost, *, is_its_own: bool = True) -> None:
        replica.num_lost += is_its_own
        self._figures.cut_off()
        log.warning("%s: %s; its client is told", replica.url, lost)


class _Counted:
    """A request as it is counted at its replica, and its prompt where that is computed."""

    def __init__(
        self, routing: Routing, replica: FleetReplica, sent: Sent, place: PromptPlace | None
    ) -> None:
        self.replica = replica
        self._routing = routing
        self._sent, self._place = sent, place
        self._has_begun = False

    def begin(self) -> None:
        """Note that the answer has begun, so that its prompt is computed."""
        if self._has_begun:
            return
        self._has_begun = True
        self._routing.begun(self._sent)
        if self._place is not None:
            self._routing.ended(self._place.sent)

    def end(self) -> None:
        """Note that the request has ended, in whatever way."""
        self.replica.num_open -= 1
        self._routing.ended(self._sent)
        if self._place is not None:
            self._routing.ended(self._place.sent)


class ClientWatch:
    """Cancels the task that creates it once the request's client disconnects, until `end`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.is_gone = False
        self._state = state
        self._task = asyncio.current_task()
        self._again: asyncio.TimerHandle | None = None
        # serving.api.protocol calls it; a task that waits for the disconnect would cost more.
        state["when_gone"] = self._gone

    def end(self) -> None:
        """Stop watching."""
        del self._state["when_gone"]
        if self._again is not None:
            self._again.cancel()

    def _gone(self) -> None:
        assert self._task is not None, "made outside of a task"
        if self._again is not None:
            self._again.cancel()
        self.is_gone = True
        self._task.cancel()
        # `asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives just as it ends.
        self._again = self._task.get_loop().call_later(AGAIN_S, self._gone)


def _cut_off(scope: Scope) -> None:
    """Break the client's connection: half an answer must not look whole, nor wait for its reader for ever."""
    cut_off: Callable[[], None] = scope["state"]["cut_off"]
    cut_off()


def _with_done(event: bytes) -> bytes:
    """Return an error event with the end of a stream, which may have come behind it or not."""
    return event if event.rstrip().endswith(_ENDS) else event + DONE


def _passed_on(scope: Scope) -> HeaderLines:
    """Return the client's headers without those that concern only this connection."""
    headers = [each for each in scope["headers"] if each[0] not in _NOT_PASSED_ON]
    name = scope.get("state", {}).get("request_id")
    return [*headers, (b"x-request-id", name.encode())] if name else headers


def _owner(scope: Scope) -> str:
    """Return whose a request is: without keys of the router, that of the key which it shows replicas."""
    client: Client = scope.get("state", {}).get("client") or ANYBODY
    headers = dict(scope["headers"])
    shown = headers.get(b"authorization", headers.get(b"x-api-key", b""))
    return client.owner or shown.rpartition(b" ")[2].decode("latin-1")


def _kept(headers: HeaderLines) -> HeaderLines:
    return [each for each in headers if each[0] not in _NOT_SENT_BACK]


async def _whole(answer: UpstreamAnswer) -> bytes:
    """Return the body of a short answer; raises Lost for one that is too long."""
    parts, num_bytes = [], 0
    while part := await answer.next():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MOST_WHOLE_BYTES:
            raise Lost(f"it answered with more than {_MOST_WHOLE_BYTES} bytes")
    return b"".join(parts)


async def _send_whole(send: Send, status: int, headers: HeaderLines, body: bytes) -> None:
    kept = [*_kept(headers), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})


async def _tell_aborted(reply: Reply, known: KnownAnswer) -> None:
    known.is_told_aborted = True
    await reply.error(CutOff.status, "the request was aborted", code=CutOff.code)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
