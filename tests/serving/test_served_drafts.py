"""Served streams end inside an accepted run of drafts where they end without drafts.

A request that allows no drafts, answered by the same server, shows where that is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, started
from tests.thorough import cases

SETTINGS = (
    "scheduler.num_slots=4",
    "device.threads=1",
    "device.compile=false",
    "model.dtype=float32",
    "speculation.kind=ngram",
    "speculation.max_tokens=8",
    "speculation.adaptive=fixed",
)
PROMPT = "one two three four five six seven one two three four five six seven one two three"
# No end token may end the answer, of which n-grams of the prompt guess a part
STORY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "logit_bias": {"2": -100.0}, "logprobs": 1}
PLACES = range(10, 40, cases(9, 1))  # places of the answer, within runs of right drafts and between
Shown = tuple[str, list[Any], list[Any], Any, Any, int]


class Logprob(float):
    """A log-probability, whose last digits may differ between batches."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    server: Server = started((TINY, *SETTINGS))
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client
    assert server.close() == 0


def streamed(client: httpx.Client, body: dict[str, Any]) -> Shown:
    """What a stream shows from its beginning to its end."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response = client.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    *lines, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    return (
        "".join(each["text"] for each in choices),
        [token for each in choices for token in each["token_ids"]],
        [(token, Logprob(value)) for each in choices for token, value in told(each["logprobs"])],
        choices[-1]["finish_reason"],
        choices[-1]["stop_reason"],
        last["usage"]["completion_tokens"],
    )


def told(logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    return [] if logprobs is None else list(zip(logprobs["tokens"], logprobs["token_logprobs"]))


def counted(client: httpx.Client, name: str) -> list[float]:
    """The values of a metric so far, by its labels."""
    lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{"))]


def check(client: httpx.Client, body: dict[str, Any]) -> Shown:
    """The same with drafts and without."""
    found = streamed(client, body)
    assert found == streamed(client, body | {"max_draft_tokens": 0})
    assert found[5] == len(found[1]) == len(found[2])
    return found


@pytest.mark.slow
def test_a_request_allows_drafts_or_none_and_they_are_counted(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "max_draft_tokens": 0}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    check(client, STORY)
    named = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    names = [f"vllm:spec_decode_num_{each}_total" for each in named]
    until_s = time.monotonic() + PATIENCE_S
    while not any(counted(client, names[2])):  # told by the engine a few times a second
        assert time.monotonic() < until_s
    (spans,), (drafts,), (right,), places = (counted(client, each) for each in names)
    assert 0 < right <= drafts <= 8 * spans
    assert (len(places), sum(places)) == (8, right)
    refused = client.post("/v1/completions", json=STORY | {"max_draft_tokens": -1})
    assert refused.status_code == 400
    assert "max_draft_tokens is -1; it must be an integer from 0" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_stream_ends_within_a_run_of_drafts_where_it_ends_without(client: httpx.Client) -> None:
    """By its length, by a token and by a string; where a token stood before `min_tokens`, another comes."""
    text, tokens, *_ = streamed(client, STORY)
    for place in PLACES:
        found = check(client, STORY | {"max_tokens": place})
        assert (found[3], found[5]) == ("length", place)
        found = check(client, STORY | {"stop_token_ids": [tokens[place]], "min_tokens": place})
        assert found[5] > place
        assert tokens[place] not in found[1][:place]
    for place in range(len(text) - 20, len(text) - 4, cases(8, 2)):
        stop = text[place : place + 4]
        found = check(client, STORY | {"stop": [stop], "min_tokens": PLACES[0]})
        assert found[0] + stop == text[: len(found[0]) + len(stop)]
        assert found[3:5] == ("stop", stop)
        assert PLACES[0] < found[5] <= 40
