"""Requests go to the replicas of the model that they name, whatever the replicas do.

The replicas are scripted servers on real sockets, and the router is asked without one; in the last test
both are real.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
import zmq.asyncio

from serving.api.api_keys import ANYBODY
from serving.router import replicas as of_replicas
from serving.router.fair_turns import ModelTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.page_reader import PageReader
from serving.router.prompts import Prompts
from serving.router.proxy import Proxy
from serving.router.replicas import MOST_INFO_BYTES, MOST_METRICS_BYTES
from serving.router.server import FleetApplication
from tests.each_of import each_of
from tests.lazy import openai
from tests.serving.router.test_hostile_replicas import CHUNKED, LONG, Watched, endless, models
from tests.serving.router.test_lost_replicas import answer
from tests.serving.router.test_proxy import Script, run
from tests.serving.router.under_fire import fleet, wait_ready
from tests.serving.router.waiting import until
from tests.serving.server import Server

READY: dict[str, Script] = {"ready": answer(b"")}
LATE: dict[str, Script] = {"ready": answer(b"", 503)}
TINY: dict[str, Script] = {"models": models("tiny", "alias", adapters=("pirate",))}
AGENT: dict[str, Script] = {"models": models("agent")}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)
    monkeypatch.setattr(of_replicas, "_ANSWER_S", 60.0)  # a busy machine takes no replica for a silent one


class Routed(Watched):
    """A router of such replicas; each answers a request with its number, and says what it was asked for."""

    most_open = 100

    def join(self, *urls: str) -> None:
        super().join(*urls)
        turns = ModelTurns(
            lambda turn: self.most_open * max(1, self.members.models.num_open(turn, self.routing.is_open))
        )
        self.figures = FleetFigures(self.routing, self.replicas, turns)
        self.proxy = Proxy(
            self.routing, self.replicas, Prompts(), turns, self.figures, models=self.members.models
        )
        self.app = FleetApplication(self.proxy, self.members, self.figures, is_local=True)

    async def __aenter__(self) -> Routed:
        await super().__aenter__()
        return self

    async def all_ready(self) -> None:
        await until(lambda: all(self.is_sent()))

    async def ask(
        self,
        path: str,
        body: Any = None,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
        client: Any = ANYBODY,
    ) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        sent, status = [], 0
        received = asyncio.Queue[dict[str, Any]]()
        received.put_nowait(
            {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}
        )

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            sent.append(message.get("body", b""))

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": [*headers], "state": {"client": client},
        }  # fmt: skip
        await self.app(scope, received.get, send)
        return status, json.loads(b"".join(sent) or b"null")

    async def asked(self, model: str | None, number: int = 8, **options: Any) -> Counter[int]:
        """How many of so many requests for a model each replica got."""
        before = [each.num_sent for each in self.replicas]
        body = {"messages": [], "stream": False} | ({} if model is None else {"model": model})
        for _ in range(number):
            status, said = await self.ask(CHAT, body, **options)
            assert status == 200, said
        return Counter({at: each.num_sent - old for at, (each, old) in enumerate(zip(self.replicas, before))})

    async def refused(self, model: str | None, path: str = CHAT) -> tuple[int, dict[str, Any]]:
        body = {"input": "a"} | ({} if model is None else {"model": model})
        before = [each.num_sent for each in self.replicas]
        status, said = await self.ask(path, body)
        assert [each.num_sent for each in self.replicas] == before, "no replica is asked"
        return status, said["error"]


def test_a_request_goes_to_the_replicas_of_its_model_and_to_each_of_them() -> None:
    async def test() -> None:
        async with Routed(TINY, AGENT, TINY) as fleet:
            await fleet.all_ready()
            for name in ("tiny", "alias", "pirate"):
                found = await fleet.asked(name)
                assert found[0] == found[2] == 4, name
                assert not found[1]
            assert await fleet.asked("agent") == {0: 0, 1: 8, 2: 0}

    run(test)


PATHS = ("/v1/completions", "/v1/responses", "/v1/embeddings", "/rerank", "/v1/score", "/tokenize", MESSAGES)


@each_of("path", [*PATHS, f"{MESSAGES}/count_tokens"])
def test_every_path_with_a_model_is_routed_by_it(path: str) -> None:
    async def test() -> None:
        async with Routed(TINY, AGENT) as fleet:
            await fleet.all_ready()
            for number, name in enumerate(("pirate", "agent")):
                assert (await fleet.ask(path, {"model": name, "user": 3}))[0] == 200
                assert fleet.replicas[number].num_sent == 1
            status, error = await fleet.refused("tinny", path)
            assert status == 404
            assert all(name in error["message"] for name in ("tinny", "tiny", "alias", "pirate", "agent"))
            status, error = await fleet.refused(None, path)
            assert status == 400
            assert "model is missing" in error["message"]
            assert "'tiny', 'alias', 'agent', 'pirate'" in error["message"]
            assert error["type"] == "invalid_request_error"

    run(test)


def test_the_list_of_models_is_that_of_all_replicas() -> None:
    async def test() -> None:
        async with Routed(TINY, AGENT, AGENT | LATE, {"models": models("alias", "tiny")}) as fleet:
            await until(lambda: fleet.is_sent() == [True, True, False, True])
            await until(
                lambda: fleet.replicas[2].listed.models == ("agent",),
            )
            status, said = await fleet.ask("/v1/models", method="GET")
            assert (status, said["object"]) == (200, "list")
            assert [each["id"] for each in said["data"]] == ["tiny", "alias", "agent", "pirate"]
            status, said = await fleet.ask("/v1/models/pirate", method="GET")
            assert (status, said) == (200, {"id": "pirate", "parent": "tiny"})
            status, said = await fleet.ask("/v1/models/other", method="GET")
            assert (status, said["error"]["type"]) == (404, "not_found_error")
            shown = (await fleet.ask("/fleet", method="GET"))[1]["replicas"]
            assert [each["models"] for each in shown] == [
                ["tiny", "alias"], ["agent"], ["agent"], ["alias", "tiny"],
            ]  # fmt: skip
            assert shown[0]["adapters"] == ["pirate"]
            health = (await fleet.ask("/health", method="GET"))[1]
            assert [each["models"] for each in health["replicas"]] == [each["models"] for each in shown]
            assert [each["state"] for each in health["replicas"]] == ["ready", "ready", "not ready", "ready"]
            assert (await fleet.ask("/health", method="GET", client=None))[1] == {"status": "ok"}, (
                "without a key"
            )

    run(test)


def test_without_a_model_all_replicas_must_serve_the_same() -> None:
    """Also those that are away: their model is known until they are removed."""

    async def test() -> None:
        async with Routed(TINY, {"models": models("tiny")}, LATE) as fleet:
            three = fleet.replicas[2]
            await until(lambda: fleet.is_sent() == [True, True, False])
            assert await fleet.asked(None) == {0: 4, 1: 4, 2: 0}
            fleet.says(2, **AGENT)
            await fleet.all_ready()
            assert (await fleet.refused(None))[0] == 400
            assert (await fleet.ask("/v1/load_lora_adapter", {"lora_name": "a"}))[0] == 400
            fleet.says(2, **LATE)
            await until(lambda: three.state == "not ready")
            assert (await fleet.refused(None))[0] == 400
            status, error = await fleet.ask(CHAT, {"model": "agent"})
            assert (status, error["error"]["type"]) == (503, "service_unavailable_error"), "it may come back"
            assert "'agent'" in error["error"]["message"]
            fleet.members.remove(three.url)
            await until(lambda: three.state == "gone")
            assert await fleet.asked(None) == {0: 4, 1: 4, 2: 0}
            assert (await fleet.refused("agent"))[0] == 404

    run(test)


def test_a_replica_that_serves_another_model_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Also where it was away between two polls alone; adapters that come and go are no other model."""

    async def test() -> None:
        async with Routed(TINY, AGENT) as fleet:
            await fleet.all_ready()

            def num_infos() -> int:
                return sum(b"/server_info" in each for each in fleet.stubs[1].heads)

            infos = num_infos()
            fleet.says(1, models=models("new"))
            await until(lambda: fleet.replicas[1].listed.models == ("new",))
            assert fleet.is_sent() == [True, True]
            assert await fleet.asked("new") == {0: 0, 1: 8}
            status, error = await fleet.refused("agent")
            assert (status, "'new'" in error["message"]) == (404, True)
            await until(lambda: num_infos() == infos + 1)
            fleet.says(1, models=models("new", adapters=("fox",)))
            await until(lambda: "fox" in fleet.replicas[1].listed.adapters)
            assert await fleet.asked("fox") == {0: 0, 1: 8}
            assert num_infos() == infos + 1

    run(test)
    lines = [each for each in caplog.messages if "no longer" in each]
    assert len(lines) == 1
    assert lines[0].endswith("serves the model 'new', and no longer the model 'agent'")


def test_a_name_is_unknown_only_once_all_replicas_were_heard() -> None:
    """One that is starting says what it will serve; of one that cannot be reached, nothing is known."""

    async def abort(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        async with Routed(TINY, {"ready": abort, "models": abort}) as fleet:
            await until(lambda: fleet.is_sent() == [True, False])
            status, error = await fleet.refused("agent")
            assert (status, "'tiny'" in error["message"]) == (503, True)
            fleet.says(1, **AGENT | LATE)
            await until(lambda: fleet.replicas[1].listed.models == ("agent",))
            assert (await fleet.refused("other"))[0] == 404
            assert (await fleet.ask(CHAT, {"model": "agent"}))[0] == 503

    run(test)


def test_a_server_that_lists_nothing_gets_what_others_do_not_list() -> None:
    """Where the others serve one model, it is taken to serve it, too."""

    async def test() -> None:
        nothing = {"models": answer(b"", 404)}
        async with Routed(TINY, nothing, LATE) as fleet:
            await until(lambda: fleet.is_sent() == [True, True, False])
            assert await fleet.asked("tiny") == await fleet.asked(None) == {0: 4, 1: 4, 2: 0}
            assert await fleet.asked("other") == {0: 0, 1: 8, 2: 0}
            fleet.says(2, **AGENT)
            await fleet.all_ready()
            assert await fleet.asked("tiny") == {0: 8, 1: 0, 2: 0}
            assert await fleet.asked("other") == {0: 0, 1: 8, 2: 0}
        async with Routed(nothing, nothing) as fleet:
            await fleet.all_ready()
            assert await fleet.asked("any") == await fleet.asked(None) == {0: 4, 1: 4}
            assert (await fleet.ask("/v1/models", method="GET"))[0] == 404, "as a replica answers"

    run(test)


def test_an_error_of_an_overloaded_list_changes_nothing() -> None:
    async def test() -> None:
        async with Routed(TINY, AGENT) as fleet:
            await fleet.all_ready()
            for status in (429, 503):
                fleet.says(1, models=answer(b"", status))
                asked = len(fleet.stubs[1].heads)
                await until(lambda: len(fleet.stubs[1].heads) > asked + 9)  # noqa: B023 - called here
                assert await fleet.asked("agent") == {0: 0, 1: 8}

    run(test)


def test_a_replica_that_does_not_know_the_model_after_all_is_not_the_last_word() -> None:
    """It has just been started anew, or has unloaded the adapter."""

    async def test() -> None:
        error = answer(b'{"error":{"message":"there is no model"}}', 404)
        unknown = READY | {"other": error}
        async with Routed(TINY | unknown, TINY, AGENT | unknown) as fleet:
            await fleet.all_ready()
            found = await fleet.asked("pirate")
            assert found[1] == 8
            assert not found[2]
            status, said = await fleet.ask(CHAT, {"model": "agent"})
            assert (status, said["error"]["message"]) == (404, "there is no model"), "as it said it"

    run(test)


def test_a_session_has_a_replica_of_each_model() -> None:
    async def test() -> None:
        async with Routed(TINY, TINY, AGENT, AGENT) as fleet:
            await fleet.all_ready()
            total: Counter[int] = Counter()
            for _ in range(4):
                for name in ("tiny", "agent", "alias"):
                    total += await fleet.asked(name, 1, headers=[(b"x-session-id", b"a")])
            assert sorted(total.values()) == [4, 8]

    run(test)


def test_requests_for_one_model_do_not_wait_for_the_replicas_of_another() -> None:
    goes_on = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await goes_on.wait()
        await answer(b"{}")(writer)

    async def test() -> None:
        async with Routed(TINY | READY | {"other": slow}, AGENT) as fleet:
            fleet.most_open = 1
            await fleet.all_ready()
            asking = [asyncio.ensure_future(fleet.ask(CHAT, {"model": "tiny"})) for _ in range(3)]
            await until(lambda: fleet.replicas[0].num_open == 1)
            assert await fleet.asked("agent") == {0: 0, 1: 8}
            assert fleet.replicas[0].num_sent == 1
            goes_on.set()
            assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 3

    run(test)


def test_what_may_be_missing_may_be_too_long(caplog: pytest.LogCaptureFixture) -> None:
    long = endless(CHUNKED, LONG)

    async def test() -> None:
        async with Watched({"metrics": long}, {"models": long}) as fleet:
            await until(lambda: fleet.is_sent() == [True, True])
            asked = len(fleet.stubs[0].heads)
            await until(lambda: len(fleet.stubs[0].heads) > asked + 6)
            one, two = (each.url for each in fleet.replicas)
        assert sorted(each for each in caplog.messages if "answers with more" in each) == sorted(
            [
                f"{one}: its figures are ignored: /metrics answers with more than {MOST_METRICS_BYTES} bytes",
                f"{two}: its model is unknown, and is not checked: /v1/models answers with more than"
                f" {MOST_INFO_BYTES} bytes",
            ]
        ), "told once"

    run(test)


def test_pages_are_read_of_the_recipes_model_alone() -> None:
    """Once there are two models; the keys of another model's pages are not those that the router computes."""
    info = b'{"page_size": 16, "recipe": {"cache": {"events": "tcp://127.0.0.1:9"}}}'

    async def test() -> None:
        said = {"server_info": answer(info)}
        async with Watched(said | TINY, said | AGENT | LATE) as fleet:
            found = fleet.members.models
            found._recipe_name = "agent"
            one, two = fleet.replicas
            await until(lambda: one.state == "ready")
            fleet.says(1, **said | AGENT)
            await until(lambda: two.reader is not None)
            await until(lambda: one.reader is None)
            assert [found.is_of_recipe(name) for name in ("tiny", "pirate", "agent")] == [False, False, True]
            fleet.says(1, **said | TINY)
            await until(lambda: one.reader is not None and two.reader is not None)
            assert found.is_of_recipe("tiny"), "one model can only be the recipe's"

    run(test)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["no descriptor is free", "it is no address"])
def test_pages_that_cannot_be_read_are_warned_of_once_and_tried_again_where_that_may_help(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, is_short, num_failed = "tcp://127.0.0.1:9", not is_wrong, 0
    info = {"page_size": 16, "recipe": {"cache": {"events": endpoint[is_wrong:]}}}
    make = zmq.asyncio.Context.socket

    def socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        nonlocal num_failed
        if is_short and kind == zmq.PAIR:
            num_failed += 1
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, kind)

    tried = list[str]()

    def reader(endpoint: str, *rest: Any) -> PageReader:
        tried.append(endpoint)
        return PageReader(endpoint, *rest)

    async def test() -> None:
        nonlocal is_short
        monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
        monkeypatch.setattr(of_replicas, "PageReader", reader)
        async with Watched({"server_info": answer(json.dumps(info).encode())} | TINY) as fleet:
            (one,) = fleet.replicas
            await until(lambda: one.state == "ready")
            heads = fleet.stubs[0].heads
            polled = len(heads) + 20
            await until(lambda: len(heads) > polled)
            assert caplog.text.count("its pages cannot be read at") == 1
            if is_wrong:
                assert len(tried) == 1
                return
            assert num_failed > 1
            assert one.reader is None
            is_short = False
            await until(lambda: one.reader is not None)
            assert fleet.routing.tells[0]

    run(test)


def test_each_model_is_answered_by_its_own_replica(shared: Server, agent: Server) -> None:
    replicas = [option for each in (shared, agent) for option in ("--replica", each.url)]
    front = Server(*replicas, verb="scripts.route")
    wait_ready(front.url, 2)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["tiny", "agent"]
        for model in ("tiny", "agent"):
            asked: dict[str, Any] = {"model": model, "prompt": "One day", "max_tokens": 4, "temperature": 0}
            whole = client.completions.create(**asked)
            assert whole.model == model
            pieces = [each.choices[0].text for each in client.completions.create(**asked, stream=True)]
            assert "".join(pieces) == whole.choices[0].text
        assert [each["sent"] for each in fleet(front.url)["replicas"]] == [2, 2]
        with pytest.raises(openai.NotFoundError, match="'tiny', 'agent'"):
            client.completions.create(model="other", prompt="One day")
    assert front.close() == 0
