"""An operator halts a server's engine, puts it to sleep and gives it other weights, while clients ask.

Each answer is wholly that of the weights which its usage names. What is wrong changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from safetensors.torch import load_file, save_file

from recipes.schema.reader import load
from serving.engine.messages import DropWeights, OrderDone, PutWeights, ReadWeights, Sleep, ToEngine, WakeUp
from serving.engine.supervisor import Supervisor
from serving.failures import Unavailable
from serving.llm import LLM
from serving.orders import Orders
from serving.outputs import VllmSamplingParams as SamplingParams
from tests.models.test_live_memory import SINGLE, TINY_WEIGHTS, changed, segment
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, defects, started
from tests.serving.test_lost_ranks import followers

OPERATOR, OTHER = {"authorization": "Bearer gateway"}, {"authorization": "Bearer other"}
ROUTES = ("/pause", "/resume", "/sleep", "/wake", "/update_weights")
OPENING = "What is the sum of 12 and 30, and what is the product of 12 and 30? Say it at length: "
PROMPTS = [f"{OPENING}{number}+{number}=" for number in range(3)]
LENGTH = 24
OVERRIDES = ("cache.page_size=8", "device.threads=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the tiny model, the one that is served first and another."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.copytree(TINY_WEIGHTS, folder / "old")
    changed(TINY_WEIGHTS, folder / "new")
    return folder


@pytest.fixture(scope="module")
def right(root: Path) -> dict[str, list[str]]:
    """The answers of engines that were started on them."""
    return {name: alone(root / name) for name in ("old", "new")}


def alone(path: Path) -> list[str]:
    llm = LLM(TINY, f"model.path={path}", *OVERRIDES)
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    return [llm.generate([each], params)[0].outputs[0].text for each in PROMPTS]


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("gateway *\nother team\n")
    keys.chmod(0o600)
    asked = TINY, f"model.path={root / 'old'}", f"server.weights_root={root}", *OVERRIDES
    server = started((*asked, "--api-keys", str(keys)))
    yield server
    found = [line for line in defects(server, 0) if "ended by signal 9" not in line]  # a test has sent it
    assert not found
    assert server.close() == 0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """An operator's client of a server that serves the first weights, awake and not paused."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=OPERATOR) as client:
        client.post("/wake")
        assert client.post("/resume").status_code == 200
        update(client, path="old", version="old")
        yield client


def update(http: httpx.Client, **asked: Any) -> dict[str, Any]:
    answer = http.post("/update_weights", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def update_alone(http: httpx.Client, **asked: Any) -> httpx.Response:
    """Order an update once no other order is being carried out."""
    until_s = time.monotonic() + PATIENCE_S
    while "another order is being carried out" in (answer := http.post("/update_weights", json=asked)).text:
        assert time.monotonic() < until_s
    return answer


def ask(http: httpx.Client, prompt: str, length: int = LENGTH, **more: Any) -> httpx.Response:
    fields = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=fields | more)


def texts(http: httpx.Client) -> list[str]:
    return [ask(http, each).json()["choices"][0]["text"] for each in PROMPTS]


def metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"cb_{name}{{")]
    return float(lines[0].rpartition(" ")[2])


def test_other_weights_answer_and_what_was_cached_is_not_found(
    http: httpx.Client, right: dict[str, list[str]]
) -> None:
    assert texts(http) == right["old"]
    again = ask(http, PROMPTS[0]).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    put = update(http, path="new", version="step-2")
    first = ask(http, PROMPTS[0]).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["usage"]["weights_version"] == put["weights_version"] == "step-2"
    assert first["system_fingerprint"] == put["system_fingerprint"] != again["system_fingerprint"]
    assert texts(http) == right["new"]
    found = http.get("/server_info").json()
    assert (found["weights_version"], found["paused"], found["asleep"]) == ("step-2", False, False)
    assert 'version="step-2"} 1.0' in http.get("/metrics").text
    assert update(http, path="old")["system_fingerprint"] == again["system_fingerprint"], "of the same files"
    assert texts(http) == right["old"]


def test_each_form_of_answers_names_the_weights(root: Path) -> None:
    agent = started(("recipes/tiny/agent.yaml", f"server.weights_root={root}", "model.pooling=last"))
    with httpx.Client(base_url=agent.url, timeout=PATIENCE_S) as http:
        version = http.get("/server_info").json()["weights_version"]
        chat = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat | {"model": "agent"}),
            ("/v1/responses", {"input": "1+1", "max_output_tokens": 4}),
            ("/v1/embeddings", {"input": ["a", "b"]}),
            ("/v1/completions", {"prompt": "1+1", "max_tokens": 4, "beam_width": 2}),
        ]
        for path, body in asked:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["weights_version"] == version, path
        streamed = chat | {"stream": True, "stream_options": {"include_usage": True}}
        lines = http.post("/v1/chat/completions", json=streamed).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["usage"]["weights_version"] == version
    assert agent.close() == 0


def until(holds: Callable[[], bool]) -> None:
    due_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < due_s
        time.sleep(0.05)


def test_a_pause_begins_no_step_and_a_resume_goes_on(http: httpx.Client, right: dict[str, list[str]]) -> None:
    assert http.post("/pause").json() == {"paused": True}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(http, PROMPTS[0])))
    thread.start()
    until(lambda: metric(http, "requests_queued") == 1)
    steps = metric(http, "batch_size_count")
    put = update(http, path="new", version="v3")
    assert (metric(http, "requests_queued"), metric(http, "engine_paused")) == (1, 1)
    assert metric(http, "batch_size_count") == steps
    assert not answers
    assert http.post("/resume").json() == {"paused": False}
    thread.join(PATIENCE_S)
    body = answers[0].json()
    assert body["usage"]["weights_version"] == put["weights_version"], "it had not begun"
    assert body["choices"][0]["text"] == right["new"][0]


def test_what_is_open_is_aborted_or_holds_the_order_up_as_asked(http: httpx.Client) -> None:
    http.post("/pause")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(http, PROMPTS[0])))
    thread.start()
    until(lambda: metric(http, "requests_queued") == 1)
    refused = http.post("/update_weights", json={"path": "new", "running": "refuse"})
    assert (refused.status_code, "1 requests are open" in refused.text) == (400, True)
    assert http.get("/server_info").json()["weights_version"] == "old"
    update(http, path="new", running="abort")
    thread.join(PATIENCE_S)
    assert (answers[0].status_code, "an operator's order" in answers[0].text) == (503, True)
    assert answers[0].headers["retry-after"]


def test_sleep_gives_the_pages_back_and_wake_answers_again(
    http: httpx.Client, right: dict[str, list[str]]
) -> None:
    assert texts(http) == right["old"]
    facts = http.get("/server_info").json()
    page_bytes = 4 * 8 * 2 * 128 * 4  # layers, tokens, keys and values, numbers of a head, bytes
    slept = http.post("/sleep").json()
    assert slept == {"asleep": True, "num_bytes": facts["num_pages"] * page_bytes}
    assert http.get("/ready").json() == {"status": "asleep"}
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    asked = ask(http, PROMPTS[0])
    assert (asked.status_code, "sleeps, until an operator wakes it" in asked.text) == (503, True)
    assert http.post("/sleep").status_code == 400
    update(http, path="new", version="asleep")
    assert http.post("/wake").json() == {"asleep": False, "num_bytes": slept["num_bytes"]}
    assert http.post("/wake").status_code == 400
    assert texts(http) == right["new"]


def test_weights_come_from_shared_memory(http: httpx.Client, root: Path, right: dict[str, list[str]]) -> None:
    data = (root / "new" / SINGLE).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    with segment(data) as name:
        put = update(http, shared_memory=name, sha256=digest)
    assert put["weights_version"] == f"w_{digest[:16]}"
    assert texts(http) == right["new"]


def test_what_is_wrong_changes_nothing(
    http: httpx.Client, root: Path, right: dict[str, list[str]], tmp_path: Path
) -> None:
    tensors = load_file(root / "new" / SINGLE)
    broken = root / "broken"
    shutil.copytree(root / "new", broken)
    name = max(tensors)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, broken / SINGLE)
    linked = root / "linked"
    shutil.copytree(root / "new", linked)
    shutil.copytree(root / "new", tmp_path / "outside")
    (linked / SINGLE).unlink()
    (linked / SINGLE).symlink_to(tmp_path / "outside" / SINGLE)
    digest = "0" * 64
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path": "broken"}, name),
        ({"path": "linked"}, "a link that leads out of server.weights_root"),
        ({"path": "../outside"}, "leads out of server.weights_root"),
        ({"path": "absent"}, "is no folder"),
        ({"path": "old/config.json"}, "is no folder"),
        ({"path": "\0"}, "is no path"),
        ({}, "exactly one of path and shared_memory"),
        ({"path": "new", "shared_memory": "a", "sha256": digest}, "exactly one of path and shared_memory"),
        ({"shared_memory": "a"}, "goes with shared_memory"),
        ({"path": "new", "sha256": digest}, "goes with shared_memory"),
        ({"shared_memory": "../a", "sha256": digest}, "must be a name"),
        ({"shared_memory": "a" * 300, "sha256": digest}, "must be a name"),
        ({"shared_memory": "none-such", "sha256": digest}, "none-such"),
        ({"shared_memory": "a", "sha256": "0"}, "sha256"),
        ({"path": "new", "version": "a b"}, "version"),
        ({"path": "new", "version": "a" * 65}, "version"),
        ({"path": "new", "running": "stop"}, "running"),
        ({"path": "new", "other": 1}, "other"),
    ]
    for body, said in wrong:
        answer = http.post("/update_weights", json=body)
        assert (answer.status_code, said in answer.text) == (400, True), (body, answer.text)
        assert str(root) not in answer.text
    assert texts(http) == right["old"]
    assert http.get("/server_info").json()["weights_version"] == "old"


@pytest.mark.slow
def test_an_engine_that_is_lost_is_followed_by_one_with_the_same_weights(
    http: httpx.Client, server: Server, root: Path, right: dict[str, list[str]]
) -> None:
    update(http, path="new", version="kept")
    kill(server)
    assert texts(http) == right["new"]
    assert ask(http, PROMPTS[0]).json()["usage"]["weights_version"] == "kept"
    data = (root / "old" / SINGLE).read_bytes()
    with segment(data) as name:
        update(http, shared_memory=name, sha256=hashlib.sha256(data).hexdigest())
    assert texts(http) == right["old"]
    http.post("/sleep")
    http.post("/pause")
    kill(server, ready=503)
    gone = ask(http, PROMPTS[0])
    assert (gone.status_code, "without the weights that were ordered" in gone.text) == (503, True)
    found = http.get("/server_info").json()
    assert (found["paused"], found["asleep"]) == (True, True)
    # The engine is told to sleep and to pause after what is waited for
    assert update_alone(http, path="new", version="again").status_code == 200
    assert http.post("/wake").status_code == 200
    assert http.post("/resume").status_code == 200
    assert texts(http) == right["new"]


class Obedient:
    """An engine that does at once what it is told."""

    why_not, ready_in_s = "the engine is starting", 1.0

    def __init__(self) -> None:
        self.facts = object()
        self.orders: Orders | None = None
        self.told: list[type[ToEngine]] = []
        self.needs_room = False  # it has none for new weights beside its pages

    def send(self, message: ToEngine) -> None:
        is_full = self.needs_room and Sleep not in self.told
        self.told.append(type(message))
        if not isinstance(message, DropWeights):
            assert self.orders is not None
            self.orders.hear(OrderDone("no room" * (is_full and isinstance(message, ReadWeights))))


@pytest.mark.parametrize(
    ("becomes", "told"),
    [
        ("same", [ReadWeights, PutWeights]),
        ("other", [ReadWeights, DropWeights]),
        ("gone", [ReadWeights, DropWeights]),
    ],
)
def test_a_folder_that_holds_other_weights_by_now_is_not_put_again(
    root: Path, tmp_path: Path, becomes: str, told: list[type[ToEngine]]
) -> None:
    latest = Path(shutil.copytree(root / "new", tmp_path / "latest"))
    engine = Obedient()
    recipe = load(TINY, [f"server.weights_root={tmp_path}"])
    orders = engine.orders = Orders(recipe, cast(Supervisor, engine), list, lambda answer, failure: None)

    async def lost() -> None:
        await orders.update_from_folder("latest", "v1", "wait")
        engine.told.clear()
        shutil.rmtree(latest)
        if becomes != "gone":
            shutil.copytree(root / ("new" if becomes == "same" else "old"), latest)
            (latest / "eval_results.json").write_text("{}")  # as trainers write beside the weights
        orders.begin()
        while "is given" in orders.why_not:
            await asyncio.sleep(0.001)

    asyncio.run(lost())
    assert engine.told == told
    assert ("the folder holds other weights by now" in orders.why_not) == (becomes != "same")


def test_an_engine_that_is_lost_while_the_folder_is_read_leaves_the_next_one_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read nothing that could be put."""
    shutil.copytree(root / "new", tmp_path / "latest")
    engine = Obedient()
    recipe = load(TINY, [f"server.weights_root={tmp_path}"])
    orders = engine.orders = Orders(recipe, cast(Supervisor, engine), list, lambda answer, failure: None)
    compare, told = Orders._is_other, list[type[ToEngine]]()

    async def lost() -> None:
        await orders.update_from_folder("latest", "v1", "wait")
        engine.told.clear()
        loop, first = asyncio.get_running_loop(), engine.facts

        def lose(self: Orders, folder: Path) -> bool:
            if engine.facts is first:
                told.extend(engine.told)
                engine.told.clear()
                engine.facts = object()
                loop.call_soon_threadsafe(orders.begin)
            return compare(self, folder)

        monkeypatch.setattr(Orders, "_is_other", lose)
        orders.begin()
        while "is given" in orders.why_not:
            await asyncio.sleep(0.001)

    asyncio.run(lost())
    assert (told, engine.told) == ([ReadWeights], [ReadWeights, PutWeights])
    assert (orders.why_not, orders.is_asleep) == ("", False)


def test_an_order_that_fails_when_nobody_waits_for_it_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the server ends before the engine has answered: a task's failure would be a traceback."""
    engine = Silent()
    recipe = load(TINY, [f"server.weights_root={tmp_path}"])
    orders = Orders(recipe, cast(Supervisor, engine), list, lambda answer, failure: None)

    async def leave() -> None:
        waits = asyncio.ensure_future(orders.pause(is_on=True))
        await engine.is_told.wait()
        waits.cancel()
        await asyncio.wait([waits])
        orders.lose(Unavailable("the engine has ended"))
        while orders._works:
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(leave())
    said = [each.getMessage() for each in caplog.records]
    assert said == ["an order whose client has gone has failed: the engine has ended"]


class Silent:
    """An engine that answers no order."""

    facts = object()

    def __init__(self) -> None:
        self.is_told = asyncio.Event()

    def send(self, message: ToEngine) -> None:
        """Hear it."""
        self.is_told.set()


def test_weights_that_fit_only_where_the_pages_are_are_put_again(root: Path, tmp_path: Path) -> None:
    """As after `/sleep`, the order and `/wake`; an engine that sleeps on has the room at once."""
    shutil.copytree(root / "new", tmp_path / "latest")
    engine = Obedient()
    recipe = load(TINY, [f"server.weights_root={tmp_path}"])
    orders = engine.orders = Orders(recipe, cast(Supervisor, engine), list, lambda answer, failure: None)

    async def told_again() -> list[type[ToEngine]]:
        engine.told.clear()
        orders.begin()
        while "is given" in orders.why_not:
            await asyncio.sleep(0.001)
        return [*engine.told]

    async def lost() -> None:
        await orders.update_from_folder("latest", "v1", "wait")
        engine.needs_room = True
        assert await told_again() == [ReadWeights, Sleep, ReadWeights, PutWeights, WakeUp]
        assert (orders.why_not, orders.is_asleep) == ("", False)
        orders.is_asleep = True
        assert await told_again() == [Sleep, ReadWeights, PutWeights]

    asyncio.run(lost())


def kill(server: Server, ready: int = 200) -> None:
    """End the engine, and wait until another is ready and has what was ordered."""
    since = len(server.log)
    os.kill(server.engine_pid, signal.SIGKILL)
    server.wait_for(r"ready .*process \d+", since)
    if ready == 200:
        server.wait_until("/ready", 200)
    else:
        server.wait_for("cannot be read again", since)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_all_ranks_change_or_none_does(root: Path, right: dict[str, list[str]], ranks: str) -> None:
    """A tensor of the first layer is missing, which in stages the rank that follows alone holds."""
    headless = root / f"headless {ranks}"
    shutil.copytree(root / "new", headless)
    tensors = load_file(headless / SINGLE)
    name = min(each for each in tensors if ".layers.0." in each)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, headless / SINGLE)
    asked = *OVERRIDES, ranks, "device.compile=false", "model.dtype=float32", "server.step_timeout_s=300"
    served = started((TINY, f"model.path={root / 'old'}", f"server.weights_root={root}", *asked))
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S) as client:

        def is_wholly(version: str) -> None:
            found = [ask(client, each).json()["choices"][0]["text"] for each in PROMPTS[:2]]
            assert found == right[version][:2]

        is_wholly("old")
        refused = client.post("/update_weights", json={"path": headless.name})
        assert (refused.status_code, name in refused.text) == (400, True), refused.text
        is_wholly("old")
        if ranks == "parallel.tensor=2":
            data = (root / "new" / SINGLE).read_bytes()
            with segment(data) as name:
                update(client, shared_memory=name, sha256=hashlib.sha256(data).hexdigest())
        else:
            update(client, path="new", version="new")
        is_wholly("new")
        if ranks == "parallel.tensor=2":
            slept = client.post("/sleep").json()
            update(client, path="old", version="old")
            assert client.post("/wake").json()["num_bytes"] == slept["num_bytes"] > 0
            is_wholly("old")
        else:
            assert "rank 1" in refused.text, "it alone has read the layer"
            (follower,) = followers(served.engine_pid)
            os.kill(follower, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as thread:
                ordered = thread.submit(update_alone, client, path="old")
                until_s = time.monotonic() + PATIENCE_S
                while client.post("/resume").status_code == 200:  # it changes nothing
                    assert time.monotonic() < until_s
                os.kill(follower, signal.SIGKILL)
                assert ordered.result(PATIENCE_S).status_code == 503
            served.wait_until("/ready", 200)
            is_wholly("new")
    assert served.close() == 0


def test_only_operators_give_orders(http: httpx.Client) -> None:
    for path in ROUTES:
        body = {"path": "new"} if path == "/update_weights" else None
        refused = http.post(path, headers=OTHER, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error"), path
        assert http.post(path, headers={"authorization": "Bearer wrong"}, json=body).status_code == 401, path
        for headers in (
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
        ):
            assert http.post(path, headers=headers, json=body).status_code == 403, path
    assert http.get("/server_info").json()["weights_version"] == "old"


def test_without_a_root_there_are_no_such_routes(shared: Server) -> None:
    for path in ROUTES:
        assert httpx.post(f"{shared.url}{path}", json={}, timeout=PATIENCE_S).status_code == 404
