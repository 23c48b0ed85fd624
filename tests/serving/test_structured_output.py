"""Every answer over HTTP has the form that its request asked for.

Judges that are not ours decide.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel

from tests.each_of import each_of
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Who are you?"}]


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def test_a_chat_follows_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, n=4, seed=1, max_tokens=200, temperature=1.5,
        response_format=schema_format(PERSON), logprobs=True, top_logprobs=2,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)


class Plan(BaseModel):
    """What the client's helper makes a schema of, and reads back."""

    kind: Literal["a", "b"]
    done: bool
    size: Literal["small", "large"] | None


def test_the_client_s_helper_parses_a_model_of_pydantic(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Plan, max_tokens=400, temperature=1, seed=2
    )
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Plan)


@each_of(
    "extra, form",
    [
        ({"guided_regex": r"\d{3}-[a-c]{1,4}x"}, r"\d{3}-[a-c]{1,4}x"),
        ({"structured_outputs": {"regex": "(ab|cd){2}é"}}, "(ab|cd){2}é"),
        ({"guided_choice": ["yes", "no", "no more", '"\n\\']}, 'yes|no|no more|"\n\\\\'),
        ({"structured_outputs": {"choice": ["日本", "/x/"]}}, "日本|/x/"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9] [0-9]? "."'}, r"a\d\d?\."),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]{1,3}/'}}, r"a\d{1,3}"),
        ({"guided_grammar": "?start: number\nnumber: NUMBER\nNUMBER: /[0-9]{1,3}/"}, r"\d{1,3}"),
        ({"guided_choice": ["a\x7f", "b\x7f\x7fc"]}, "a\x7f|b\x7f\x7fc"),
        ({"guided_json": json.dumps({"type": "integer", "minimum": 3, "maximum": 17})}, r"[3-9]|1[0-7]"),
        ({"structured_outputs": {"json": {"const": [1, None]}}}, r"\[\s*1\s*,\s*null\s*\]"),
    ],
)
def test_other_forms(client: openai.OpenAI, extra: dict[str, Any], form: str) -> None:
    answer = client.completions.create(
        model="tiny", prompt="1+1=", n=3, seed=3, max_tokens=60, temperature=1.5, extra_body=extra
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(form, choice.text, re.ASCII), choice.text


@each_of(
    "extra, said",
    [
        ({"response_format": schema_format({"not": {}})}, 'uses the keyword "not", which cannot be enforced'),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "cannot be followed"),
        ({"guided_regex": "(?=a)b"}, "the regular expression in guided_regex cannot be followed"),
        ({"guided_regex": "(a"}, "the regular expression in guided_regex cannot be followed"),
        ({"guided_grammar": "hello"}, "the grammar in guided_grammar cannot be followed"),
        ({"structured_outputs": {"structural_tag": "a"}}, 'has no "structural_tag"'),
        ({"guided_regex": "a", "beam_width": 2}, "beam_width searches for answers of any form"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 9}, "the answer's grammar, "),
    ],
)
def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="1+1=", max_tokens=20, extra_body=extra)
    assert said in refused.value.message
    assert "\n" not in refused.value.message


def test_a_header_names_what_is_not_enforced(shared: Server) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 1, "uniqueItems": True}
    body = {"model": "tiny", "prompt": "1+1=", "max_tokens": 20, "guided_json": schema}
    noted = httpx.post(f"{shared.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert json.loads(noted.json()["choices"][0]["text"]) == [1]
    assert noted.headers["x-schema-notes"] == "not enforced: uniqueItems"
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    asked = {"model": "tiny", "input": "1+1=", "max_output_tokens": 20, "text": form}
    noted = httpx.post(f"{shared.url}/v1/responses", json=asked, timeout=PATIENCE_S)
    assert noted.headers["x-schema-notes"] == "not enforced: uniqueItems"
    many = {"type": "object", "properties": {f"p{number}": schema for number in range(10)}}
    noted = httpx.post(f"{shared.url}/v1/completions", json=body | {"guided_json": many}, timeout=PATIENCE_S)
    places = "; ".join(f"properties.p{number}.uniqueItems" for number in range(8))
    assert noted.headers["x-schema-notes"] == f"not enforced: {places}; and more"
    del schema["uniqueItems"]
    assert (
        "x-schema-notes"
        not in httpx.post(f"{shared.url}/v1/completions", json=body, timeout=PATIENCE_S).headers
    )


def test_minus_one_lets_a_completion_be_as_long_as_fits(shared: Server) -> None:
    """llama.cpp's and LM Studio's clients mean by it that there is no bound."""
    body = {"model": "tiny", "prompt": [5] * 2000, "ignore_eos": True}  # a context of 2,048 is nearly full
    answer = httpx.post(f"{shared.url}/v1/completions", json=body | {"n_predict": -1}, timeout=PATIENCE_S)
    assert answer.json()["usage"]["completion_tokens"] == 48, "without it there would be 16"


def test_an_answer_that_nobody_reads_ends_while_its_grammar_is_compiled(shared: Server) -> None:
    large = {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(400)},
        "required": [f"p{number}" for number in range(400)],
    }
    with httpx.Client(base_url=shared.url, timeout=0.001) as impatient, pytest.raises(httpx.TimeoutException):
        impatient.post("/v1/completions", json={"prompt": "a", "guided_json": large, "max_tokens": 1500})
    answer = httpx.post(
        f"{shared.url}/v1/completions", json={"prompt": "1+1=", "max_tokens": 2}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200


def test_metrics_say_what_grammars_cost(shared: Server, client: openai.OpenAI) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"{shared.url}/metrics", timeout=PATIENCE_S).text
        found = re.findall(r"^cb_grammar_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
        return {
            name + ("/refused" if "refused" in labels else ""): float(value) for name, labels, value in found
        }

    before = values()
    client.completions.create(model="tiny", prompt="a", max_tokens=9, extra_body={"guided_regex": "[ab]{3}"})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(
            model="tiny", prompt="a", max_tokens=9, extra_body={"guided_regex": "(?=a)"}
        )
    until_s = time.monotonic() + PATIENCE_S
    grow = ("masks_total", "mask_seconds_total", "compiles_total", "compile_seconds_total")
    while not all((after := values())[name] > before[name] for name in grow):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    while values()["compiles_total/refused"] == before["compiles_total/refused"]:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert after["errors_total"] == before["errors_total"]
