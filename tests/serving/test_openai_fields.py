"""Every field that OpenAI's client can send is served, accepted or refused.

A field is accepted without effect only where its value asks for nothing.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import pytest

from borders.version import VERSION
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving import fingerprint
from serving.api.embeddings import EmbeddingsBody
from serving.api.responses import ResponsesBody
from serving.api.schemas import ChatBody, CompletionBody, problem_of
from serving.failures import ClientGone, CutOff, EngineEnded, ShutDown
from tests.each_of import each_of
from tests.lazy import openai
from tests.serving.server import TINY, Server
from tests.thorough import first_quick

OWN = {"self", "extra_body", "extra_headers", "extra_query", "timeout"}  # the client's own, never sent
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat.completions", ChatBody),
        ("completions", CompletionBody),
        ("responses", ResponsesBody),
        ("embeddings", EmbeddingsBody),
    ],
)
def test_no_field_of_openai_s_client_is_unknown(route: str, body: Any) -> None:
    with openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none") as client:
        create = attrgetter(f"{route}.create")(client)
    sent = set(inspect.signature(create).parameters) - OWN
    assert not sent - body.model_fields.keys() - body.ignored.keys()


@each_of(
    "field, value, beside",
    [
        ("metadata", {str(n): "x" for n in range(17)}, {}),
        ("metadata", {"a" * 65: "x"}, {}),
        ("metadata", {"a": "x" * 513}, {}),
        ("metadata", {"a": 1}, {}),
        ("metadata", [], {}),
        ("store", 1, {}),
        ("verbosity", "none", {}),
        ("safety_identifier", "a" * 1025, {}),
        ("functions", [TOOL], {}),
        ("functions", [TOOL] * 129, {"function_call": "none"}),
        ("function_call", "auto", {}),
        ("modalities", ["text", "audio"], {}),
        ("prediction", "Hello", {}),
        ("web_search_options", {}, {}),
        ("audio", {}, {}),
    ],
)
def test_what_would_change_an_answer_is_refused(field: str, value: Any, beside: dict[str, Any]) -> None:
    problem = problem_of(field, {field: value} | beside)
    assert problem is not None
    assert problem.startswith(f"{field} is not supported")


def test_a_cut_off_answer_is_not_sent_again_by_openai_s_clients() -> None:
    client = openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none")
    with client:
        gone = ClientGone("b", "disconnect")
        for failure, code in (
            (CutOff("a", "asked"), "aborted"),
            (gone, "aborted"),
            (ShutDown(), None),
            (EngineEnded("a"), "engine_lost"),
        ):
            assert client._should_retry(httpx.Response(failure.status)) == (code != "aborted")
            assert failure.code == code


def test_a_fingerprint_is_of_what_tokens_depend_on() -> None:
    plain = fingerprint.of(load(TINY), "1")
    assert plain == fingerprint.of(load(TINY, ["server.max_requests=3", "server.model_names=[a]"]), "1")
    assert plain != fingerprint.of(load(TINY, ["cache.page_size=4"]), "1")
    assert plain != fingerprint.of(load(TINY), "2")


@pytest.mark.parametrize(
    "place",
    ["cache.tier={kind: disk, gib: 1, path: /%s}", "cache.events=ipc:///%s", "parallel.interface=%s"],
)
def test_a_fingerprint_has_nothing_of_places(place: str) -> None:
    keys = ["cache.host_gib=0.01", "parallel.tensor=2"]
    one, other = (
        fingerprint.of(load(TINY, [*keys, f"parallel.nodes=[{name}1,{name}2]", place % name]), "1")
        for name in ("a", "b")
    )
    assert one == other


def test_a_fingerprint_is_of_the_files_of_adapters_and_not_of_where_they_lie(tmp_path: Path) -> None:
    def of(folder: str) -> str:
        said = f"adapters.folders={{sums: {tmp_path / folder}}}"
        return fingerprint.of(load(TINY, ["adapters.most=1", said]), "1")

    for folder, weights in (("one", "1"), ("moved", "1"), ("other", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_text(weights)
    assert of("one") == of("moved") != of("other")


def test_answers_go_on_wherever_the_same_factors_rotate() -> None:
    """The longest request decides which factors "longrope" has, and nothing of another model."""
    one, other = (
        fingerprint.of_continuations(load(TINY, [f"scheduler.max_request_tokens={most}", *more]), "1")
        for most, more in ((64, ()), (65, ("cache.num_pages=9",)))
    )
    assert one == other
    assert one[False] != one[True]


def test_a_model_that_stands_in_the_recipe_has_a_fingerprint_of_its_own() -> None:
    for made in (lambda recipe: fingerprint.of(recipe, "1"), fingerprint.of_pages):
        one = [
            made(load("recipes/bench/llama_125m.yaml", said))
            for said in ([], ["model.config.rope_theta=9.0"])
        ]
        assert made(load("recipes/bench/llama_125m.yaml")) == one[0] != one[1]


def test_engines_exchange_pages_and_answers_only_if_both_promise_the_same_bits_or_neither_does() -> None:
    for made in (fingerprint.of_pages, lambda recipe: fingerprint.of_continuations(recipe, "1")):
        said = ([], ["device.threads=1"], ["device.batch_invariant=true", "device.compile=true"])
        plain, alike, promised = (made(load(TINY, each)) for each in said)
        assert plain == alike != promised


def test_a_fingerprint_leaves_out_what_is_no_file(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "recipes/tiny/weights", tmp_path / "weights")
    (folder / "notes.json").mkdir()
    (folder / "consolidated.safetensors").symlink_to(tmp_path / "never_downloaded")
    assert fingerprint.of(load(TINY, [f"model.path={folder}"]), "1") == fingerprint.of(load(TINY), "1")


@pytest.fixture(scope="module")
def named() -> Iterator[Server]:
    server = Server(TINY, "server.model_names=[gpt-4o, tiny, 'org/other']").ready()
    yield server
    assert server.close() == 0


@pytest.fixture
def client(named: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{named.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_alias_is_listed_and_answers_by_its_name(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["tiny", "gpt-4o", "org/other"]
    assert client.models.retrieve("org/other").id == "org/other"
    marks = set()
    for name in ("tiny", "gpt-4o", "org/other"):
        answer = client.chat.completions.create(model=name, service_tier="auto", **HELLO)
        assert (answer.model, answer.service_tier) == (name, "default")
        streamed = list(client.chat.completions.create(model=name, stream=True, **HELLO))
        assert {each.model for each in streamed} == {name}
        marks |= {answer.system_fingerprint, *(each.system_fingerprint for each in streamed)}
    assert marks == {fingerprint.of(load(TINY), VERSION)}
    with pytest.raises(openai.NotFoundError, match="serves 'tiny', 'gpt-4o', 'org/other'"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 10**6}, "max_tokens"), ({"max_completion_tokens": 10**6}, "max_completion_tokens")],
)
def test_too_long_an_answer_is_refused_in_the_words_that_clients_know(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="tiny", messages=HELLO["messages"], **fields)
    error = refusal.value
    assert (error.code, error.param, error.type) == (
        "context_length_exceeded",
        param,
        "invalid_request_error",
    )
    assert "This model's maximum context length is 2048 tokens. However, you requested 10000" in error.message
    assert "chatcmpl" not in error.message
    assert "scheduler." not in error.message


@pytest.mark.parametrize(
    "prompt", first_quick(2, [[5] * 2048, "a " * 2100, "a" * 10**6, [[5] * 5000]]), ids=len
)
def test_too_long_a_prompt_is_refused_so_too(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as refusal:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")
    cut = {"truncate_prompt_tokens": -1}
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=cut)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2047


def test_a_request_that_forbids_itself_every_token_is_a_mistake_of_its_own(client: openai.OpenAI) -> None:
    nothing = {"allowed_token_ids": [300], "min_tokens": 2, "stop_token_ids": [300]}
    with pytest.raises(openai.BadRequestError, match="together leave no token that could come next"):
        client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body=nothing)
    only = {"allowed_token_ids": [300, 301], "bad_words": ["x"], "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body=only)
    assert set(answer.choices[0].model_extra["token_ids"]) <= {300, 301}
