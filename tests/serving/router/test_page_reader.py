"""The router knows which pages a replica's cache holds, also after it missed some events."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.routing import RoutedPrompt, Routing
from kv_cache import events as page_events
from kv_cache.event_messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, encode
from kv_cache.page_keys import short_key
from serving.router import page_reader
from serving.router.fair_turns import FairTurns
from serving.router.page_reader import PageReader
from serving.router.replicas import ReplicaTrust
from tests.continuous_batching.test_state_schedules import after, engine_of, serve, states_of
from tests.kv_cache.test_events import SECRET, Engine
from tests.patience import PATIENCE_S
from tests.serving.router.waiting import until


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def end(engine: Engine) -> None:
    """Close its events; its thread removes the files of its sockets by their names, which others get next."""
    engine.events.close()
    engine.events._thread.join(PATIENCE_S)


def test_a_reader_knows_what_a_cache_holds(tmp_path: Path) -> None:
    """One that comes late; then evictions; then another engine at the same place, which counts from 0."""

    async def test() -> None:
        engine, routing = Engine(tmp_path, 16), Routing(2)
        engine.compute(list(range(12)))
        reader = PageReader(engine.endpoint, "127.0.0.1", 1, routing)
        reader.start()

        def knows() -> bool:
            held = engine.held()
            return len(routing.held) == len(held) and all(routing.held.masks.get(key) == 2 for key in held)

        await until(knows)
        for number in range(30):
            engine.compute([number, *range(7)])
        await until(knows)
        end(engine)
        engine = Engine(tmp_path, 16)
        engine.compute(list(range(50, 58)))
        await until(knows)
        reader.close()
        assert len(routing.held) == 0
        engine.events.close()

    run(test)


def test_an_engine_in_the_place_of_another_is_known_from_its_beginning(tmp_path: Path) -> None:
    """It has published more than the other when it is found, so that no number shows that it is new."""

    async def test() -> None:
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
        old, new, routing = Engine(tmp_path / "old"), Engine(tmp_path / "new"), Routing(1)
        for engine, count in ((old, 3), (new, 9)):
            for number in range(count):
                sent = engine.events._next
                engine.compute([number, count, *range(6)])
                await until(lambda engine=engine, sent=sent: engine.events._next > sent)
        reader = PageReader(old.endpoint, "127.0.0.1", 0, routing)
        reader.start()
        await until(lambda: {*routing.held.masks} == old.held())
        end(old)
        for file in ("events", "events.replay"):
            (tmp_path / "new" / file).rename(tmp_path / "old" / file)
        await until(lambda: {*routing.held.masks} == new.held())
        reader.close()
        assert not routing.tells[0]
        new.events.close()

    run(test)


def test_a_reader_that_cannot_connect_again_expects_nothing_and_tries_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has descriptors for some of its sockets and not for all, and then for all again."""
    monkeypatch.setattr(page_reader, "_ASK_S", 0.05)
    make, made, num_failed, is_short = zmq.asyncio.Context.socket, list[zmq.asyncio.Socket](), 0, True

    def socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        nonlocal num_failed
        if is_short and (kind == zmq.PAIR or (num_failed % 2 and kind == zmq.DEALER)):
            num_failed += 1
            raise zmq.ZMQError(errno.EMFILE)
        made.append(make(context, kind))
        return made[-1]

    async def test() -> None:
        nonlocal is_short
        engine, routing = Engine(tmp_path, 16), Routing(1)
        engine.compute(list(range(12)))
        reader = PageReader(engine.endpoint, "127.0.0.1", 0, routing)
        reader.start()
        await until(lambda: {*routing.held.masks} == engine.held())
        monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
        end(engine)
        await until(lambda: num_failed > 3)
        assert not routing.tells[0]
        assert not len(routing.held)
        assert caplog.text.count("its pages cannot be read at") == 1
        sent = routing.send(RoutedPrompt(9, [1, 2], 4), 0.0)
        assert sent is not None
        routing.ended(sent)
        assert len(routing.supposed) == 2
        num_short, is_short, engine = len(made), False, Engine(tmp_path, 16)
        engine.compute(list(range(20)))
        await until(lambda: {*routing.held.masks} == engine.held())
        assert routing.tells[0]
        assert not len(routing.supposed), "what was only assumed is believed no more"
        assert all(each.closed for each in made[:num_short])
        reader.close()
        engine.events.close()

    run(test)


def test_a_router_expects_no_more_of_a_replica_than_its_windows_allow(tmp_path: Path) -> None:
    async def test() -> None:
        engine, routing = Engine(tmp_path, 16, windows=(6,)), Routing(1)
        keys = engine.compute(list(range(20)))
        reader = PageReader(engine.endpoint, "127.0.0.1", 0, routing)
        reader.start()
        await until(lambda: routing.num_found(keys, 4).tolist() == [5])
        engine.groups[0].evict(1)  # the last of a chain goes first
        await until(lambda: routing.num_found(keys, 4).tolist() == [4])
        with pytest.raises(ValueError, match="see no window of tokens"):
            reader._stored(BlockStored([1], None, [], 4, group_idx=1))
        with pytest.raises(ValueError, match="group 65 is none from 1 to 64"):
            reader._stored(BlockStored([], None, [], 4, group_idx=65, kv_cache_spec_sliding_window=6))
        reader.close()
        engine.events.close()

    run(test)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_router_expects_no_more_of_a_replica_than_its_states_allow(
    tmp_path: Path, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a few states, and pages, are evicted for others; also where the list of all replaces a queue."""
    monkeypatch.setattr(page_events, "MOST_QUEUED", 3 if overflows else 1000)

    async def test() -> None:
        engine, routing = engine_of(60, 6), Routing(1)
        prefix = engine.scheduler.prefix
        prefix.listener = told = page_events.PageEvents(prefix, 16, f"ipc://{tmp_path}/events")
        reader = PageReader(f"ipc://{tmp_path}/events", "127.0.0.1", 0, routing)
        reader.start()
        asked = [
            Request(str(own), after(shared, own), SamplingParams(max_tokens=4))
            for shared, own in [
                (200, 5),
                (150, 9),
                (130, 31),
                (70, 70),
                (0, 200),
                (0, 180),
                (200, 60),
                (64, 9),
            ]
        ]

        def knows() -> bool:
            right = []
            for request in asked:
                request.page_keys = engine.scheduler.page_keys(request)
                keys = request.page_keys[: request.num_findable // 16]
                found = int(routing.num_found([*map(short_key, keys)], 16)[0])
                right.append(found == len(engine.scheduler.lifecycle.find(request)))
            return all(right)

        hits = 0
        for request in asked:
            serve(engine, request.prompt)
            await until(knows)
            hits += len(engine.scheduler.lifecycle.find(request)) > 0
        assert hits == len(asked)
        assert states_of(engine).counts.evicted_pages
        assert len(routing.held) < len(prefix.index), "pages that no state stands behind are not told of"
        reader.close()
        told.close()

    run(test)


def test_what_a_replica_tells_of_its_pages_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys that it tells again are no more, and removing those that it never had makes no room."""
    monkeypatch.setattr(page_reader, "_MOST_PAGES", 8)

    async def test() -> None:
        routing = Routing(1, tells=False)
        reader = PageReader(f"ipc://{tmp_path}/events", "127.0.0.1", 0, routing)
        for each in (reader._live, reader._again):
            assert int(each.getsockopt(zmq.RCVHWM)) * int(each.getsockopt(zmq.MAXMSGSIZE)) <= 2**28
        batches: list[list[BlockStored | BlockRemoved | AllBlocksCleared]] = [
            [BlockStored([*range(8)], None, [], 16), BlockStored([*range(8)], None, [], 16)],
            [BlockRemoved([0, 1]), BlockStored([10, 11], None, [], 16)],
            [AllBlocksCleared(), BlockStored([*range(8)], None, [], 16), BlockRemoved([*range(20, 30)])],
        ]
        for number, events in enumerate(batches):
            reader._take(number, encode(KVEventBatch(0.0, events)))
        assert len(routing.held) == 8
        reader.close()
        context = zmq.Context()
        live = context.socket(zmq.PUB)
        live.bind(f"ipc://{tmp_path}/events")
        reader = PageReader(f"ipc://{tmp_path}/events", "127.0.0.1", 0, routing)
        reader.start()
        batch = encode(KVEventBatch(0.0, [BlockStored([*range(9)], None, [], 16)]))

        def gives_up() -> bool:
            live.send_multipart([b"", b"\0" * 8, batch])
            return not routing.tells[0]

        await until(gives_up)
        assert not len(routing.held)
        assert "it announces more than 8 pages" in caplog.text
        reader.close()
        context.destroy(linger=0)

    run(test)


def test_a_router_with_a_secret_believes_only_who_proves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher without it, or with another, is not believed, and the log says what to set."""

    async def test() -> None:
        for number, (here, there) in enumerate([(SECRET, None), (SECRET, b"b" * 32), (None, SECRET)]):
            folder = tmp_path / str(number)
            folder.mkdir()
            engine, routing = Engine(folder, 16, secret=there), Routing(1)
            keys = engine.compute(list(range(12)))
            reader = PageReader(engine.endpoint, "127.0.0.1", 0, routing, here)
            caplog.clear()
            reader.start()
            await until(lambda: "set cache.events_key_file to files of the same content" in caplog.text)
            assert not len(routing.held)
            reader.close()
            engine.events.close()
        engine, routing = Engine(tmp_path, 16, secret=SECRET), Routing(1)
        reader = PageReader(engine.endpoint, "127.0.0.1", 0, routing, SECRET)
        reader.start()
        keys = engine.compute(list(range(12)))
        await until(lambda: {*routing.held.masks} == {*keys})
        reader.close()
        engine.events.close()

    run(test)


def test_a_publisher_without_proof_is_not_asked_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_reader, "_AGAIN_S", 0.0)
    monkeypatch.setattr(page_reader, "_ASK_S", 2 * PATIENCE_S)

    async def test() -> None:
        engine = Engine(tmp_path, 16)
        reader = PageReader(engine.endpoint, "127.0.0.1", 0, Routing(1), SECRET)
        reader.start()
        await until(lambda: "set cache.events_key_file to files of the same content" in caplog.text)
        await asyncio.sleep(0.2)  # many connections
        assert reader._num_unproven == 3
        reader.close()
        engine.events.close()

    run(test)


def test_a_refused_question_keeps_a_reader_from_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who refuses a connection before a question is judged; one that refuses questions alone is left."""
    monkeypatch.setattr(page_reader, "_ASK_S", 0.05)
    num_refused = 0

    async def refuse(_from: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        nonlocal num_refused
        num_refused += 1
        # ZMTP 3.0's greeting: signature, version, mechanism, and the rest of its 64 bytes
        to.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32))
        await _from.read()
        to.close()

    async def test() -> None:
        places = [str(tmp_path / name) for name in ("events", "events.replay")]
        servers = [await asyncio.start_unix_server(refuse, place) for place in places]
        reader = PageReader(f"ipc://{places[0]}", "127.0.0.1", 0, Routing(1))
        await until(lambda: not int(reader._again.get(zmq.EVENTS)) & zmq.POLLOUT)
        with pytest.raises(StopIteration):  # it waits for nothing
            reader._ask().send(None)
        reader.start()
        await until(lambda: "set cache.events_key_file to files of the same content" in caplog.text)
        servers[0].close()
        Path(places[0]).unlink()
        context = zmq.Context()
        live = context.socket(zmq.PUB)
        live.bind(f"ipc://{places[0]}")
        await until(lambda: reader._has_agreed)
        before = num_refused
        await until(lambda: num_refused > before + 1)
        reader.close()
        context.destroy(linger=0)
        servers[1].close()

    run(test)


def test_events_of_another_machine_are_read_with_a_secret_or_where_the_recipe_is_open() -> None:
    for trust, expected in (
        (ReplicaTrust(), False),
        (ReplicaTrust(SECRET), True),
        (ReplicaTrust(None, True), True),
    ):
        assert trust.believes_events("tcp://*:5557", "10.0.0.1") is expected
        assert trust.believes_events("tcp://10.0.0.1:5557", "127.0.0.1") is expected
        assert trust.believes_events("tcp://0.0.0.0:5557", "127.0.0.1")
        assert trust.believes_events("ipc:///run/events", "10.0.0.1")


def test_a_request_that_is_cancelled_waits_no_longer() -> None:
    async def test() -> None:
        turns = FairTurns(lambda: 1)
        await turns.enter("first", 1)
        waiting = [asyncio.ensure_future(turns.enter("many", tokens)) for tokens in (10, 20, 30)]
        gone = asyncio.ensure_future(turns.enter("gone", 5))
        await asyncio.sleep(0)
        assert (turns.num_waiting, turns.waiting_tokens) == (4, 65)
        for each in (gone, waiting[1]):
            each.cancel()
        await asyncio.wait((gone, waiting[1]))
        assert (turns.num_waiting, turns.waiting_tokens) == (2, 40), "no turn has come meanwhile"
        for each in (waiting[0], waiting[2]):
            turns.leave()
            await each
        turns.leave()
        assert (turns.num_open, turns.num_waiting) == (0, 0)

    run(test)


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    async def test() -> None:
        turns, order = FairTurns(lambda: 1), list[str]()

        async def ask(tenant: str) -> None:
            await turns.enter(tenant, 100)
            order.append(tenant)
            await asyncio.sleep(0)
            turns.leave()

        many = [asyncio.ensure_future(ask("many")) for _ in range(6)]
        await asyncio.sleep(0)
        few = [asyncio.ensure_future(ask("few")) for _ in range(2)]
        gone = asyncio.ensure_future(ask("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*many, *few)
        assert order[:6].count("few") == 2, "not behind all that came before"
        assert (turns.num_open, turns.num_waiting) == (0, 0)

    run(test)
