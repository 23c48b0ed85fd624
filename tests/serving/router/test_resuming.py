"""An answer whose replica is lost goes on at another one, and what a replica tells of it is bounded.

The replicas are scripted servers on real sockets, which tell frames; what real ones tell is tested elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from recipes.schema.server_section import ServerSection
from serving.api.errors import anthropics_error, error_body
from serving.api.streamed import COMMENT
from serving.continuation import (
    FRAMES,
    MOST_RESUMED,
    NO_LOGPROBS,
    NOT_RESUMED_HEADER,
    PATH,
    ROUTER_KEY_HEADER,
    AnswerBegun,
    Frame,
    Grown,
    Over,
    encode,
    framed,
    read_continuation,
)
from serving.router import framed_answer
from serving.router import proxy as of_proxy
from serving.router.models import Listed
from serving.router.reply import REFUSED
from serving.router.resuming import MOST_LOSSES, KnownAnswer, KnownAnswers
from serving.router.upstream import Lost
from tests.patience import PATIENCE_S
from tests.serving.router.test_lost_replicas import by_path
from tests.serving.router.test_proxy import Fleet, Script, Stub, chunk, error_of, hang, run, stream, whole
from tests.serving.router.waiting import until

HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: {FRAMES}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
LIKE = "go_1"
BEGUN = AnswerBegun("chatcmpl-1", 7, LIKE, "", 11, 100, bytes(8), 2, 50, True)
WHOLE_BEGUN = msgspec.structs.replace(BEGUN, is_stream=False)
UNTOLD = Grown([1], NO_LOGPROBS, 0, b"")  # a token of which its client has nothing yet
END = Over(200, "", b"data: [DONE]\n\n")
ASIDE = Over(503, "", b'{"error":{"message":"the server sleeps","code":503}}')  # as an order ends an answer
MISFIT = whole(409, b'{"error":{"message":"other weights"}}')
BUSY = whole(503, b'{"error":{"message":"busy"}}')


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_proxy, "_LOOK_S", 0.01)


def grown(*tokens: int) -> Grown:
    """Tokens, each with an event of its own."""
    payload = b"".join(b'data: {"token":%d}\n\n' % token for token in tokens)
    return Grown([*tokens], NO_LOGPROBS, 0, payload)


def tells(*frames: Frame, ends: bool = True, raw: bytes = b"") -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for data in (*map(framed, frames), *([raw] if raw else [])):
            writer.write(chunk(data))
            await writer.drain()
            await asyncio.sleep(0.005)
        if ends:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    return script


def dies(*frames: Frame) -> Script:
    return tells(*frames, ends=False)


class Telling(Fleet):
    """A fleet whose replicas tell tokens; `likes` are the fingerprints of their continuations."""

    def __init__(self, *scripts: Script | None, likes: Sequence[str | None] = ()) -> None:
        super().__init__(*scripts)
        self._likes = likes or [LIKE] * len(scripts)

    async def __aenter__(self) -> Telling:
        await super().__aenter__()
        for replica, like in zip(self.replicas, self._likes):
            replica.continuations = like
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.proxy._answers.num_bytes == 0, "an answer is kept that has ended"
        await super().__aexit__(*_)

    def sent_to(self, number: int) -> Any:
        """The continuation that a replica was last sent."""
        stub = self.stubs[number]
        assert isinstance(stub, Stub)
        assert stub.heads[-1].startswith(b"POST %s " % PATH.encode())
        assert f"\r\n{ROUTER_KEY_HEADER}: Bearer".encode() in stub.heads[-1]
        return read_continuation(stub.bodies[-1])

    def num_asked(self) -> list[int]:
        return [0 if each is None else len(each.bodies) for each in self.stubs]


def leaves(fleet: Telling, *frames: Frame) -> Script:
    """The first replica tells this, and gets no more requests."""

    async def script(writer: asyncio.StreamWriter) -> None:
        fleet.replicas[0].drain(True)
        await dies(*frames)(writer)

    return script


def tokens_in(body: bytes) -> list[int]:
    return [
        msgspec.json.decode(event[6:])["token"]
        for event in body.split(b"\n\n")
        if event.startswith(b'data: {"token"')
    ]


def test_a_stream_goes_on_with_what_its_client_has() -> None:
    """What had come of a frame that was not whole is sent by the replica that goes on."""
    cut = tells(BEGUN, grown(1, 2), grown(3), ends=False, raw=framed(grown(4))[:-3])

    async def test() -> None:
        async with Telling(cut, tells(BEGUN, grown(4), END)) as fleet:
            status, body = await fleet.ask()
            assert (status, tokens_in(body)) == (200, [1, 2, 3, 4])
            assert body.endswith(b"data: [DONE]\n\n")
            known = fleet.sent_to(1)
            assert known.known.tolist() == [1, 2, 3]
            assert known.prompt.tolist() == [0, 0]
            assert (known.begun, known.num_resumed, known.path) == (BEGUN, 1, "/v1/chat/completions")
            assert b'"stream": true' in known.body
            assert fleet.figures.num_resumed == 1
            assert fleet.figures.num_cut_off == 0
            assert "cb_route_resumed_total 1\n" in fleet.figures.as_metrics()

    run(test)


def test_a_sign_of_life_tells_nothing_of_the_cache() -> None:
    sign = Grown([], NO_LOGPROBS, 0, COMMENT)
    told = msgspec.structs.replace(grown(1), num_cached_tokens=5)

    async def test() -> None:
        async with Telling(dies(BEGUN, told, sign), tells(BEGUN, grown(2), END)) as fleet:
            assert COMMENT in (await fleet.ask())[1]
            assert fleet.sent_to(1).num_cached_tokens == 5

    run(test)


def test_what_is_told_together_is_sent_together_and_before_a_loss() -> None:
    """Each write wakes the client, and what is known of an answer is always what its client was sent."""
    ended = Over(503, "", b"", is_lost=True)

    def at_once(*frames: Frame) -> Script:
        async def script(writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + chunk(b"".join(map(framed, frames))) + b"0\r\n\r\n")

        return script

    async def test() -> None:
        scripts = at_once(BEGUN, grown(1), grown(2), ended), at_once(BEGUN, grown(3), grown(4), END)
        async with Telling(*scripts) as fleet:
            await fleet.ask()
            assert fleet.sent_to(1).known.tolist() == [1, 2]
            assert fleet.parts == [grown(1, 2).payload, grown(3, 4).payload + END.payload]

    run(test)


def test_it_goes_on_as_often_as_it_may() -> None:
    """An engine that ended is told of by its server, and a continuation may be lost like any answer."""
    ended = Over(503, "", b"", is_lost=True)

    async def test() -> None:
        scripts = dies(BEGUN, grown(1)), tells(BEGUN, grown(2), ended), tells(BEGUN, grown(3), END)
        async with Telling(*scripts) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1, 2, 3]
            assert fleet.sent_to(2).known.tolist() == [1, 2]
            assert fleet.sent_to(2).num_resumed == 2
        async with Telling(*[dies(BEGUN, grown(1))] * 3) as fleet:
            _, body = await fleet.ask()
            assert tokens_in(body) == [1, 1, 1]
            assert "it was lost 2 times before (server.resume)" in error_of(body)["message"]
            assert error_of(body)["code"] == "replica_lost"
            assert b"[DONE]" not in body
            assert fleet.figures.num_cut_off == 1

    run(test)


def test_what_ends_engines_before_its_first_token_is_not_sent_to_all() -> None:
    """Losses count alike before and after a replica has told what its answer begins with."""
    assert ServerSection().resume == MOST_LOSSES

    async def breaks(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        ended = Over(503, "", b"", is_lost=True)
        for script in (
            breaks,
            dies(),
            dies(BEGUN),
            tells(BEGUN, ended),
            stream(ends=False),
            whole(200, b"{", 9),
        ):
            async with Telling(*[script] * 8) as fleet:
                _, body = await fleet.ask()
                assert error_of(body)["code"] == "replica_lost"
                assert "more than 3 replicas were lost" in error_of(body)["message"]
                assert sum(fleet.num_asked()) == 1 + MOST_LOSSES
        async with Telling(dies(BEGUN, grown(1)), *[breaks] * 7) as fleet:
            assert "was lost 2 times before" in error_of((await fleet.ask())[1])["message"]
            assert sum(fleet.num_asked()) == 1 + BEGUN.most_resumed
        full = whole(429, b"{}")
        async with Telling(*[None] * 4, *[full] * 4, tells(BEGUN, grown(1), END)) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1], "who refuses it has not begun it"

    run(test)


@pytest.mark.parametrize("status", [429, 499, 500, 503])
def test_a_stream_that_fails_by_itself_is_not_computed_elsewhere(status: int) -> None:
    """Its status says so, and not its last event, for which each API has names of its own."""
    error = {"type": "response.failed", "response": {"error": {"code": "server_error"}}}
    failed = Over(status, "", b"event: response.failed\ndata: " + msgspec.json.encode(error) + b"\n\n")
    is_again = status in REFUSED

    async def test() -> None:
        async with Telling(tells(BEGUN, failed), tells(BEGUN, grown(1), END)) as fleet:
            _, body = await fleet.ask("/v1/responses")
            assert body == (grown(1).payload + END.payload if is_again else failed.payload)
            assert fleet.num_asked() == [1, int(is_again)]

    run(test)


LOST_ENGINE = error_body(503, "killed", code="engine_lost")
CLAUDES = anthropics_error(503, "killed", "a", "engine_lost")


@pytest.mark.parametrize(
    "script",
    [whole(503, LOST_ENGINE), stream(b"data: %s\n\n" % LOST_ENGINE), whole(503, CLAUDES)],
    ids=["whole", "stream", "Anthropic's"],
)
def test_who_says_that_its_engine_ended_is_a_loss_also_without_frames(script: Script) -> None:
    async def test() -> None:
        async with Telling(*[script] * 8) as fleet:
            _, body = await fleet.ask()
            assert error_of(body)["code"] == "replica_lost"
            assert sum(fleet.num_asked()) == 1 + MOST_LOSSES
        async with Telling(*[script] * 3, tells(BEGUN, grown(1), END)) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1]
        async with Telling(script) as fleet:
            assert b'"killed"' in (await fleet.ask())[1], "who alone is there says why"
        async with Telling(*[BUSY] * 8) as fleet:
            assert (await fleet.ask())[0] == 503
            assert fleet.num_asked() == [2] * 8, "who is busy has not begun it"

    run(test)


def test_replicas_that_end_in_order_are_no_losses() -> None:
    """A rolling update ends one after the other, and its requests are not the cause."""
    orderly = Over(503, "", b"", is_lost=True, is_orderly=True)
    begun = msgspec.structs.replace(BEGUN, is_stream=False)
    short = msgspec.structs.replace(begun, most_tokens=2)
    told, end = Grown([1], NO_LOGPROBS, 0, b""), Over(200, "", b'{"a":1}')

    async def test() -> None:
        for leaves in ([begun, orderly], [begun, told, orderly], [short, told, orderly]):
            async with Telling(*[tells(*leaves)] * 4, tells(begun, end)) as fleet:
                assert await fleet.ask() == (200, b'{"a":1}')
                assert fleet.num_asked() == [1] * 5
        scripts = [tells(BEGUN, grown(1), orderly)] * 4, tells(BEGUN, grown(2), END)
        async with Telling(*scripts[0], scripts[1]) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1, 1, 1, 1, 2]
            assert fleet.sent_to(4).num_resumed == 4
        async with Telling(*[tells(BEGUN, orderly)] * 2) as fleet:
            _, body = await fleet.ask()
            assert error_of(body)["code"] == 503, "who says so without an end is not asked for ever"
            assert sum(fleet.num_asked()) <= MOST_RESUMED + 2

    run(test)


def test_an_answer_in_one_piece_goes_on_as_often_as_its_replicas_let_it() -> None:
    begun = msgspec.structs.replace(BEGUN, is_stream=False, most_resumed=6)
    told, end = Grown([1], NO_LOGPROBS, 0, b""), Over(200, "", b'{"a":1}')
    refused = whole(400, b"{}")

    async def breaks(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        async with Telling(dies(begun, told), *[breaks] * 5, tells(begun, end)) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}')
        async with Telling(dies(begun, told), *[breaks] * 7) as fleet:
            assert "more than 6 replicas were lost" in error_of((await fleet.ask())[1])["message"]
            assert sum(fleet.num_asked()) == 1 + 6
        async with Telling(*[dies(begun, told), refused] * 3, tells(begun, end)) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}'), "who refuses what is known of it is not lost"

    run(test)


@pytest.mark.parametrize(
    "refusal", [MISFIT, BUSY, whole(404, b"{}"), None], ids=["409", "503", "404", "away"]
)
def test_who_cannot_continue_it_is_passed_over(refusal: Script | None) -> None:
    async def test() -> None:
        scripts = dies(BEGUN, grown(1)), refusal, tells(BEGUN, grown(2), END)
        async with Telling(*scripts) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1, 2]
            assert fleet.sent_to(2).num_resumed == 1, "who refuses it has not continued it"

    run(test)


def test_it_goes_on_only_at_replicas_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.router.resuming.WAIT_S", 0.2)

    async def test() -> None:
        likes = [LIKE, "go_2", None]
        async with Telling(dies(BEGUN, grown(1)), tells(END), tells(END), likes=likes) as fleet:
            (first, *_) = fleet.replicas
            fleet.routing.is_open[0] = True
            asking = asyncio.ensure_future(fleet.ask())
            while not first.num_lost:
                await asyncio.sleep(0.005)
            fleet.routing.is_open[0] = False
            _, body = await asking
            assert "no replica like it took the answer" in error_of(body)["message"]
            assert fleet.num_asked()[1:] == [0, 0]
            assert fleet.figures.num_cut_off == 1

    run(test)


def test_it_waits_for_its_replica_to_come_back() -> None:
    async def test() -> None:
        async with Telling(dies(BEGUN, grown(1))) as fleet:
            (stub,) = fleet.stubs
            assert stub is not None
            asking = asyncio.ensure_future(fleet.ask())
            while not fleet.replicas[0].num_lost:
                await asyncio.sleep(0.001)
            stub.script = tells(BEGUN, grown(2), END)
            assert tokens_in((await asking)[1]) == [1, 2]

    run(test)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("model", ["m", None])
def test_it_waits_also_while_nobody_lists_its_model(
    model: str | None, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a rolling update, in which the only replica of its model leaves before another one comes.

    Where it names none, two that serve others are left meanwhile.
    """
    monkeypatch.setattr("serving.router.resuming.WAIT_S", 0.2 if is_late else 2 * PATIENCE_S)
    own, others = Listed({"m": b"{}"}, ("m",)), [Listed({name: b"{}"}, (name,)) for name in ("o", "p")]

    async def test() -> None:
        async with Telling(hang, tells(BEGUN, grown(2), END), hang, likes=[LIKE, LIKE, "go_2"]) as fleet:
            models, (stub, *_) = fleet.proxy._models, fleet.stubs
            models.learn(0, own)
            assert stub is not None
            stub.script = leaves(fleet, BEGUN, grown(1))
            asking = asyncio.ensure_future(fleet.ask(**({} if model is None else {"model": model})))
            await until(lambda: bool(stub.heads))
            for number, each in enumerate(others, 1):
                models.learn(number, each)
            models.forget(0)
            await until(lambda: fleet.replicas[0].num_lost == 1)
            if is_late:
                assert "no replica like it took the answer" in error_of((await asking)[1])["message"]
                assert fleet.num_asked() == [1, 0, 0]
                return
            await asyncio.sleep(0.05)  # it looks for a replica meanwhile
            models.forget(2)
            models.learn(1, own)
            assert tokens_in((await asking)[1]) == [1, 2]

    run(test)


def test_an_answer_in_one_piece_goes_on_or_begins_again() -> None:
    begun = msgspec.structs.replace(BEGUN, is_stream=False)
    told = Grown([1, 2], NO_LOGPROBS, 0, b"")
    end = Over(200, "", b'{"a":1}')

    async def test() -> None:
        async with Telling(dies(begun, told), tells(begun, end)) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}')
            assert fleet.sent_to(1).known.tolist() == [1, 2]
        short = msgspec.structs.replace(begun, most_tokens=3)
        async with Telling(dies(short, told), tells(short, end)) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}')
            assert fleet.stubs[1] is not None
            assert fleet.stubs[1].heads[-1].startswith(b"POST /v1/chat/completions "), (
                "its client has nothing"
            )
        long = [Over(200, "", b'{"a":', has_more=True), Over(200, "", b"1}")]
        async with Telling(tells(begun, told, *long)) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}')
            assert fleet.num_cut == 0
        async with Telling(dies(begun, told, long[0]), tells(begun, end)) as fleet:
            assert await fleet.ask() == (200, b'{"a":'), "what tells of the loss is no part of its JSON"
            assert (fleet.num_cut, fleet.num_asked()) == (1, [1, 0])
        scripts = dies(begun, told), whole(400, b"{}"), tells(begun, end)
        async with Telling(*scripts) as fleet:
            assert await fleet.ask() == (200, b'{"a":1}'), "what was told of it is not believed any more"
        failed = Over(429, "3", b'{"error":{"message":"full"}}')
        async with Telling(tells(begun, failed), tells(begun, failed)) as fleet:
            assert (await fleet.ask())[0] == 429
            assert fleet.num_asked() == [1, 1]

    run(test)


@pytest.mark.parametrize(
    "frames",
    [[BEGUN], [WHOLE_BEGUN], [WHOLE_BEGUN, UNTOLD], [BEGUN, UNTOLD]],
    ids=["stream", "whole", "whole behind tokens", "stream behind tokens"],
)
def test_what_its_client_has_nothing_of_begins_again_at_replicas_unlike_the_first(
    frames: list[Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, where none like it is ready: as in a rolling update."""
    monkeypatch.setattr("serving.router.resuming.WAIT_S", 2 * PATIENCE_S)
    is_stream = frames[0] == BEGUN
    answers = [BEGUN, grown(1), END] if is_stream else [WHOLE_BEGUN, Over(200, "", b'{"a":1}')]

    async def test() -> None:
        async with Telling(hang, tells(*answers), likes=[LIKE, "go_2"]) as fleet:
            first, second = (each for each in fleet.stubs if each)
            first.script = leaves(fleet, *frames)
            body = grown(1).payload + END.payload if is_stream else b'{"a":1}'
            assert await fleet.ask() == (200, body)
            assert second.heads[-1].startswith(b"POST /v1/chat/completions ")
            assert fleet.figures.num_resumed == 0

    run(test)


@pytest.mark.parametrize(
    "frames", [[WHOLE_BEGUN, UNTOLD], [BEGUN, UNTOLD], [BEGUN]], ids=["whole", "stream", "nothing known"]
)
def test_what_was_told_of_an_answer_that_ends_by_a_refusal_is_forgotten(frames: list[Frame]) -> None:
    """As an operator ends it who has a server sleep: its client has nothing of it, and it begins anew."""
    is_stream, end = frames[0] == BEGUN, Over(200, "", b"{}")

    async def test() -> None:
        async with Telling(tells(*frames, ASIDE), dies(frames[0], UNTOLD), tells(frames[0], end)) as fleet:
            assert await fleet.ask() == (200, b"{}")
            assert fleet.sent_to(2).known.tolist() == [1]
        if is_stream:  # what its client has of it cannot be given back
            async with Telling(tells(BEGUN, grown(1), ASIDE), tells(BEGUN, END)) as fleet:
                assert await fleet.ask() == (200, grown(1).payload + ASIDE.payload)
                assert fleet.num_asked() == [1, 0]

    run(test)


def test_who_has_taken_a_continuation_and_refuses_at_its_end_is_not_asked_again_at_once() -> None:
    async def test() -> None:
        async with Telling(hang, tells(WHOLE_BEGUN, UNTOLD, ASIDE)) as fleet:
            (stub, _) = fleet.stubs
            assert stub is not None
            stub.script = leaves(fleet, WHOLE_BEGUN, UNTOLD)
            assert await fleet.ask() == (503, ASIDE.payload)
            assert fleet.num_asked() == [1, 1]
            assert fleet.sent_to(1).known.tolist() == [1]

    run(test)


def test_an_answer_that_began_again_has_not_gone_on() -> None:
    """Where it then goes on, its usage counts only that."""
    other = msgspec.structs.replace(BEGUN, fingerprint="go_2")

    async def test() -> None:
        likes = [LIKE, "go_2", "go_2"]
        async with Telling(hang, dies(other, grown(1)), tells(other, END), likes=likes) as fleet:
            first, second, _ = fleet.stubs
            assert first is not None
            assert second is not None
            first.script = leaves(fleet, BEGUN, UNTOLD)
            fleet.routing.is_open[2] = False
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: bool(second.heads))
            fleet.routing.is_open[2] = True
            assert tokens_in((await asking)[1]) == [1]
            assert fleet.sent_to(2).num_resumed == 1

    run(test)


def test_who_lacks_the_adapter_holds_up_no_answer_that_may_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is like the first, whose adapter it does not have, and cannot continue the answer."""
    monkeypatch.setattr("serving.router.resuming.WAIT_S", 2 * PATIENCE_S)
    lacks = Listed({"m": b"{}"}, ("m",))
    has = Listed({"m": b"{}", "a": b"{}"}, ("m",), ("a",))

    async def test() -> None:
        good = tells(WHOLE_BEGUN, Over(200, "", b"{}"))
        async with Telling(hang, hang, good, likes=[LIKE, LIKE, "go_2"]) as fleet:
            for number, listed in enumerate([has, lacks, has]):
                fleet.proxy._models.learn(number, listed)
            (stub, *_) = fleet.stubs
            assert stub is not None
            stub.script = leaves(fleet, WHOLE_BEGUN, UNTOLD)
            assert await fleet.ask(model="a") == (200, b"{}")
            assert fleet.num_asked() == [1, 0, 1]

    run(test)


@pytest.mark.parametrize("status", [409, 413])
def test_who_does_not_continue_it_may_begin_it(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.router.resuming.WAIT_S", 0.05)
    good, refused = tells(WHOLE_BEGUN, Over(200, "", b'{"a":1}')), whole(status, b"{}")

    async def test() -> None:
        async with Telling(hang, hang) as fleet:
            first, second = (each for each in fleet.stubs if each)
            first.script = leaves(fleet, WHOLE_BEGUN, UNTOLD)
            second.script = by_path(**{"continue": refused, "other": good})(second)
            assert await fleet.ask() == (200, b'{"a":1}')
            assert second.heads[0].startswith(b"POST %s " % PATH.encode())
            assert fleet.replicas[1].num_lost == 0, "who refuses it is not lost"

    run(test)


def test_an_answer_that_waits_to_go_on_is_aborted_by_the_key_that_asked() -> None:
    unknown = whole(404, b"{}")

    def shown(key: bytes) -> list[tuple[bytes, bytes]]:
        return [(b"authorization", b"Bearer " + key)]

    async def test() -> None:
        async with Telling(hang) as fleet:
            (stub,) = (each for each in fleet.stubs if each)
            stub.script = leaves(fleet, BEGUN, grown(1))
            asking = asyncio.ensure_future(fleet.ask(headers=shown(b"mine")))
            await until(lambda: bool(fleet.replicas[0].num_lost))
            stub.script = unknown
            for key, status in ((b"other", 404), (b"mine", 200)):
                assert (await fleet.ask("/abort/chatcmpl-1", headers=shown(key)))[0] == status
            _, body = await asking
            assert (tokens_in(body), error_of(body)["code"]) == ([1], "aborted")
            assert fleet.figures.num_cut_off == 0

    run(test)


def test_an_answer_is_aborted_while_it_is_on_its_way_to_another_replica() -> None:
    unknown = whole(404, b"{}")

    async def test() -> None:
        arrives = asyncio.Event()

        async def late(writer: asyncio.StreamWriter) -> None:
            await arrives.wait()
            await tells(BEGUN, grown(2), END)(writer)

        async with Telling(hang, hang) as fleet:
            first, second = (each for each in fleet.stubs if each)
            first.script = leaves(fleet, BEGUN, grown(1))
            second.script = by_path(**{"continue": late, "other": unknown})(second)
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: bool(second.heads))
            first.script = unknown
            assert (await fleet.ask("/abort/chatcmpl-1"))[0] == 200
            arrives.set()
            _, body = await asking
            assert (tokens_in(body), error_of(body)["code"]) == ([1], "aborted")

    run(test)


@pytest.mark.parametrize("frames", [[BEGUN, grown(1)], [WHOLE_BEGUN, UNTOLD]], ids=["stream", "whole"])
def test_an_answer_is_aborted_whose_replica_is_lost_as_it_is_asked_to_abort_it(frames: list[Frame]) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"".join(map(framed, frames))))
        await writer.drain()
        await asyncio.Event().wait()

    async def test() -> None:
        async with Telling(hang, hang) as fleet:
            first, second = (each for each in fleet.stubs if each)
            first.script = by_path(completions=silent, other=hang)(first)
            second.script = by_path(**{"chatcmpl-1": whole(404, b"{}"), "other": tells(*frames, END)})(second)
            fleet.routing.is_open[1] = False
            asking = asyncio.ensure_future(fleet.ask())
            await until(lambda: any(each.num_tokens for each in fleet.proxy._answers.begun))
            fleet.routing.is_open[1] = True
            aborting = asyncio.ensure_future(fleet.ask("/abort/chatcmpl-1"))
            await until(lambda: fleet.num_asked() == [2, 1])
            fleet.replicas[0].server.lose("no answer within 2 s")
            assert await aborting == (200, b'{"id":"chatcmpl-1","aborted":1}')
            _, body = await asking
            assert error_of(body)["code"] == "aborted"
            assert fleet.num_asked() == [2, 1], "it has not gone on"
            assert not fleet.proxy._answers.begun

    run(test)


def test_what_the_new_replica_has_aborted_is_aborted() -> None:
    """It answers so where it has not begun to tell the rest."""
    aborted = whole(499, error_body(499, "the request was aborted", code="aborted"))
    good = tells(WHOLE_BEGUN, Over(200, "", b'{"a":1}'))

    async def test() -> None:
        for told in ([BEGUN, grown(1)], [WHOLE_BEGUN, UNTOLD]):
            async with Telling(hang, aborted, good) as fleet:
                stub = fleet.stubs[0]
                assert stub is not None
                stub.script = leaves(fleet, *told)
                _, body = await fleet.ask()
                assert error_of(body)["code"] == "aborted"
                assert fleet.num_asked() == [1, 1, 0]

    run(test)


def test_what_cannot_go_on_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    other = tells(BEGUN, grown(9), END)
    events = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%s: it has several samples\r\n" % (
        NOT_RESUMED_HEADER.encode()
    )

    async def samples(writer: asyncio.StreamWriter) -> None:
        writer.write(events + b"transfer-encoding: chunked\r\n\r\n" + chunk(b'data: {"token":1}\n\n'))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.transport.abort()

    async def asked(script: Script, why: str, most_bytes: int = 2**20) -> int:
        async with Telling(script, other) as fleet:
            fleet.proxy._answers = KnownAnswers(most_bytes)
            _, body = await fleet.ask()
            assert tokens_in(body)[-1] != 9
            assert why in error_of(body)["message"]
            assert NOT_RESUMED_HEADER.encode() not in body
            assert fleet.num_asked() == [1, 0]
            return fleet.replicas[0].num_lost

    async def test() -> None:
        await asked(samples, "which did not go on elsewhere because it has several samples")
        long = msgspec.structs.replace(BEGUN, most_tokens=4)
        await asked(dies(long, grown(1, 2, 3)), "more than 4 tokens (server.resume_max_tokens)")
        async with Telling(dies(BEGUN, grown(1)), whole(400, b"{}"), other) as fleet:
            _, body = await fleet.ask()
            assert "a replica refused with status 400 to continue it" in error_of(body)["message"]
            assert fleet.num_asked() == [1, 1, 0]
        await asked(dies(BEGUN, grown(1)), "the router's memory for answers is full", most_bytes=10)
        monkeypatch.setattr(framed_answer, "STALL_S", 0.0)
        num_lost = await asked(dies(BEGUN, grown(1)), "its client read too slowly")
        assert not num_lost, "a replica cuts what is not read"

    run(test)


GARBAGE = {
    "tokens before the beginning": [grown(1)],
    "bytes without tokens": [BEGUN, Grown([], NO_LOGPROBS, 0, b'data: {"token":3}\n\n')],
    "more tokens than asked for": [msgspec.structs.replace(BEGUN, max_tokens=2), grown(1, 2, 3)],
    "an end before the beginning": [END],
}


@pytest.mark.parametrize("lie", [*GARBAGE])
def test_a_replica_that_tells_what_cannot_be_is_lost_with_its_request(lie: str) -> None:
    async def test() -> None:
        async with Telling(tells(*GARBAGE[lie]), tells(BEGUN, grown(5), END)) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [5]
            assert fleet.replicas[0].num_lost == 1

    run(test)


@pytest.mark.parametrize(
    "raw", [b"\xff" * 64, b"\0\0\0\1\x05", b"\0\0\0\2\xc1\xc1", framed(BEGUN)[:4] + encode([[]] * 60)]
)
def test_what_is_no_frame_ends_the_replicas_part(raw: bytes) -> None:
    async def test() -> None:
        scripts = tells(BEGUN, grown(1), raw=raw), tells(BEGUN, grown(2), END)
        async with Telling(*scripts) as fleet:
            assert tokens_in((await fleet.ask())[1]) == [1, 2]

    run(test)


def test_a_client_sees_no_frame_and_names_no_router() -> None:
    """Its own header is not passed on, and a replica that tells nothing is not asked to."""

    async def test() -> None:
        async with Telling(tells(BEGUN, grown(1), END)) as fleet:
            stub = fleet.stubs[0]
            assert stub is not None
            forged = [(ROUTER_KEY_HEADER.encode(), b"Bearer mine")]
            _, body = await fleet.ask(headers=forged)
            assert body == grown(1).payload + END.payload
            assert b"mine" not in stub.heads[-1]
            assert len(stub.writers) == 1
            await fleet.ask()
            assert len(stub.writers) == 1, "the connection is used again"
            fleet.replicas[0].continuations = None
            await fleet.ask(headers=forged)
            assert ROUTER_KEY_HEADER.encode() not in stub.heads[-1]

    run(test)


def test_the_memory_for_answers_is_bounded_and_given_back() -> None:
    answers = KnownAnswers(most_bytes=1000)
    known = [KnownAnswer(answers, "/v1/completions", bytes(300)) for _ in range(4)]
    for each in known:
        each.begin(BEGUN)
    assert [bool(each.why_not) for each in known] == [False, False, False, True]
    assert answers.num_bytes == 3 * 308
    known[0].grow([grown(*range(40))])
    assert known[0].why_not == "the router's memory for answers is full"
    assert answers.num_bytes == 2 * 308
    for each in known:
        each.forget()
        each.forget()
    assert answers.num_bytes == 0
    with pytest.raises(Lost, match="more than 100 tokens"):
        known[1].grow([Grown([1] * 101, NO_LOGPROBS, 0, b"")])
