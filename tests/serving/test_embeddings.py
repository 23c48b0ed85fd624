"""OpenAI's client gets the embeddings that transformers computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams, Vector
from recipes.schema.recipe import ROOT
from serving.answers.answers import AnswerStream, unit
from serving.api.embeddings import EmbeddingList, EmbeddingsBody
from serving.api.pieces import PIECE_BYTES, gathered
from serving.failures import RequestFailed
from serving.llm import LLM
from serving.offline import read_jobs, run_jobs
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text, TextOptions
from tests.lazy import openai, transformers
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server

WEIGHTS = ROOT / "recipes/tiny/weights"
TEXTS = ["348+275=623. Ben has 506 books and gets 3 more.", "狐狸是红色的，跑得很快。", "One day"]


@pytest.fixture
def client(pooled: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{pooled.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@cache
def model() -> Any:
    return transformers.AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32)


def expected(text: str, pooling: str = "mean") -> Vector:
    """Scaled to length 1."""
    tokenizer = Text.load(WEIGHTS)
    assert tokenizer is not None
    with torch.inference_mode():
        states = model()(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0].numpy()
    found = states.mean(0) if pooling == "mean" else states[-1]
    scaled: Vector = found / np.linalg.norm(found)
    return scaled


def test_embeddings_are_those_of_transformers(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # which asks for base64
    assert (answer.object, answer.model) == ("list", "tiny")
    assert [each.index for each in answer.data] == [0, 1, 2]
    for each, text in zip(answer.data, TEXTS):
        np.testing.assert_allclose(each.embedding, expected(text), atol=1e-4)
        assert math.isclose(sum(number**2 for number in each.embedding), 1, abs_tol=1e-5)
    as_numbers = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(as_numbers.data[0].embedding, answer.data[0].embedding, atol=1e-6)


def test_a_text_and_its_tokens_have_the_same_embedding(client: openai.OpenAI, pooled: Server) -> None:
    body = {"prompt": TEXTS[0]}
    tokens = httpx.post(f"{pooled.url}/tokenize", json=body, timeout=PATIENCE_S).json()["tokens"]
    found = [
        client.embeddings.create(model="tiny", input=given).data[0].embedding
        for given in (TEXTS[0], tokens, [tokens])
    ]
    np.testing.assert_allclose(found, [found[0]] * 3, atol=1e-6)
    answer = client.embeddings.create(model="tiny", input=[tokens, tokens[:3]])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(tokens) + 3
    cut = {"truncate_prompt_tokens": 3}
    begin = client.embeddings.create(model="tiny", input=tokens[:3]).data[0].embedding
    for given in (TEXTS[0], tokens):
        whole = client.embeddings.create(model="tiny", input=given, extra_body=cut).data[0].embedding
        np.testing.assert_allclose(whole, begin, atol=1e-6)


def test_fewer_dimensions_are_the_first_scaled_again(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS[1], dimensions=8)
    first = expected(TEXTS[1])[:8]
    np.testing.assert_allclose(answer.data[0].embedding, first / np.linalg.norm(first), atol=1e-4)
    with pytest.raises(
        openai.BadRequestError, match=r"dimensions is 10000; it must be an integer from 1 to \d+"
    ):
        client.embeddings.create(model="tiny", input="a", dimensions=10000)


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"input": ""}, "input is empty", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": [[1], []]}, "input is empty", "input"),
        ({"input": "a " * 3000}, "maximum context length", "input"),
        ({"input": ["a"] * 1025}, "input asked for 1025 samples at once; the server takes 1024", None),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "temperature": 0}, 'unknown field "temperature"', "temperature"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], said: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/embeddings", body={"model": "tiny", **fields}, cast_to=object)
    assert said in refusal.value.message
    assert refusal.value.param == param


def test_a_model_that_was_not_trained_for_it_has_none(shared: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(
            openai.BadRequestError, match=r"model serves no embeddings: its recipe has no model\.po"
        ),
    ):
        client.embeddings.create(model="tiny", input="a")


def test_lines_of_a_file_get_embeddings_too() -> None:
    llm = LLM(TINY, "cache.num_pages=64", "scheduler.num_slots=4")
    lines = [f'{{"id": "{kind}", "prompt": "One day", "pooling": "{kind}"}}' for kind in ("last", "mean")]
    lines.append('{"id": "plain", "prompt": "348+275=", "temperature": 0}')
    records = {each["id"]: each for each in run_jobs(llm.engine, llm.text, read_jobs(lines, llm.text))}
    assert records["plain"]["text"] == "623"
    for kind in ("last", "mean"):
        np.testing.assert_allclose(records[kind]["embedding"], expected("One day", kind), atol=1e-4)
        assert "text" not in records[kind]


def test_nothing_chooses_the_tokens_of_an_embedding() -> None:
    with pytest.raises(ValueError, match="temperature must be left out beside pooling"):
        parse_request({"id": "a", "prompt_token_ids": [1], "pooling": "last", "temperature": 0}, None)
    with pytest.raises(ValueError, match='pooling is "max"; it must be "last" or "mean"'):
        parse_request({"id": "a", "prompt_token_ids": [1], "pooling": "max"}, None)


def test_a_text_that_took_too_long_fails_the_request_before_a_byte_of_it_is_sent() -> None:
    answers = []
    for name in ("a", "b"):
        request = Request(name, np.array([3, 4]), SamplingParams(max_tokens=1, pooling="mean"))
        answers.append(AnswerStream(request, None, TextOptions(), num_answers=1, max_unread_tokens=10))
    answers[0].embedding = np.ones(PIECE_BYTES, np.float32)
    form = EmbeddingList(answers, EmbeddingsBody(input=["a", "b"], encoding_format="float"), "tiny")
    with pytest.raises(RequestFailed, match="a text took longer than timeout_s"):
        next(gathered(form.whole()))
    answers[1].embedding = answers[0].embedding
    assert len([*gathered(form.whole())]) > 1, "a piece is sent before the second text is written"


def test_a_vector_of_zeros_stays_one() -> None:
    assert unit(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
    assert unit(np.array([3, 4, 12], np.float32), 2).tolist() == pytest.approx([0.6, 0.8])
