"""A server answers the requests of operators, gateways and browsers."""

from __future__ import annotations

import platform
import re
from importlib import metadata

import httpx
import pytest
import sentencepiece

from serving.api.schemas import (
    IGNORED,
    IN_RESPONSES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    StrictBody,
    TokenizeBody,
)
from tests.lazy import openai
from tests.test_imports import ROOT

WEIGHTS = ROOT / "recipes/tiny/weights"


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert model.object == "model"
    assert model.model_dump()["root"] == "tiny"
    assert model.model_dump()["max_model_len"] == 2048
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_the_recipe_the_versions_and_the_machine_are_told(http: httpx.Client) -> None:
    told = http.get("/server_info").json()
    sections = ["model", "device", "cache", "scheduler", "speculation", "parallel", "adapters", "server"]
    assert list(told["recipe"]) == sections
    assert told["recipe"]["model"]["path"] == "recipes/tiny/weights"
    assert told["recipe"]["scheduler"]["num_slots"] == told["num_slots"] == 32
    assert told["recipe"]["cache"]["page_size"] == told["page_size"] == 16
    assert told["num_pages"] == 1023
    assert told["device"]
    assert told["machine"]["python"] == platform.python_version()
    assert told["machine"]["torch"] == metadata.version("torch")
    assert told["machine"]["transformers"] == metadata.version("transformers")


@pytest.mark.parametrize("prompt", ["348+275=", "有一天，😀", "<s>One day</s>"])
def test_text_becomes_tokens(http: httpx.Client, prompt: str) -> None:
    found = http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    if "<" not in prompt:
        model = sentencepiece.SentencePieceProcessor(model_file=str(WEIGHTS / "tokenizer.model"))
        assert found["tokens"] == [1, *model.encode(prompt)]
    else:
        assert found["tokens"][:2] == [1, 1]
        assert found["tokens"][-1] == 2
    messages = [{"role": "user", "content": "Hello"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["tokens"][0] == 1
    assert http.post("/tokenize", json={"messages": messages, "prompt": prompt}).status_code == 400


@pytest.mark.parametrize("prompt", ["348+275=", "有一天，😀", " two  spaces "])
def test_tokens_become_text_again(http: httpx.Client, prompt: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": prompt}
    assert http.post("/detokenize", json={"tokens": [1024]}).status_code == 400


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody])
def test_every_field_that_may_be_absent_may_be_null(body: type[StrictBody]) -> None:
    needed = {"messages": [{}], "prompt": "a", "tokens": [5]}
    given = {name: needed[name] if field.is_required() else None for name, field in body.model_fields.items()}
    body.model_validate(given)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_an_unknown_models_tokens_are_not_found(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    assert http.post(path, json=body | {"model": "tiny"}).status_code == 200
    assert http.post(path, json=body | {"model": "other"}).status_code == 404


def test_a_request_keeps_its_id(client: openai.OpenAI, http: httpx.Client) -> None:
    raw = client.with_raw_response.models.list(extra_headers={"x-request-id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"
    first, second = (http.get("/nowhere").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_a_web_page_may_ask_if_it_is_let(http: httpx.Client) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (
        ("https://page.example", "https://page.example"),
        ("https://other.example", None),
    ):
        preflight = http.options("/v1/completions", headers=asks | {"origin": origin})
        assert preflight.headers.get("access-control-allow-origin") == allowed
        answer = http.get("/v1/models", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("path", ["/ready", "/v1/models", "/nowhere"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.content == b""
    assert head.status_code == get.status_code
    assert head.headers["content-length"] == get.headers["content-length"]


def test_head_of_a_stream_ends(http: httpx.Client) -> None:
    head = http.head("/live")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


def test_options_tells_the_methods(http: httpx.Client) -> None:
    response = http.options("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (204, "POST")
    assert http.options("/nowhere").status_code == 404


def test_the_page_on_serving_has_every_path_and_what_is_refused(http: httpx.Client) -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    documented = {(method, path) for method, path in re.findall(r"`(GET|POST) (/[\w/{}]*)`", page)}
    described = http.get("/openapi.json").json()["paths"].items()
    known = {(method.upper(), path.replace(":path", "")) for path, methods in described for method in methods}
    assert documented == known | {("GET", "/"), ("GET", "/live")}
    assert not [field for field in (*IGNORED, *IN_RESPONSES) if f"`{field}`" not in page]
