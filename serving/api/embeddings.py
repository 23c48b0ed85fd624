"""Serve `POST /v1/embeddings`: embed one text or several."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from borders.numbers import integers
from borders.refusal import BadRequest
from continuous_batching.request import Vector
from serving.answers.answers import AnswerDelta, AnswerStream, unit
from serving.api.generation import Generation, fields_as_sent, prompts_of
from serving.api.pieces import Json, Parts, pieces_of
from serving.api.schemas import Ignored, Prompt, RequestBody, takes
from serving.failures import RequestFailed

_AS_SENT = {"prompt": "input", "prompt_token_ids": "input"}


@takes("embeddings")
class EmbeddingsBody(RequestBody):
    """The body of `POST /v1/embeddings`."""

    ignored: ClassVar[Ignored] = {}
    apart = frozenset({"input", "dimensions", "encoding_format"})
    input: Prompt = Field(description="text or token ids, or several")
    dimensions: int | None = Field(None, description="keep the first so many numbers, scaled again")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="null: float")


class EmbeddingsRoute:
    """The route for embeddings."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def embed(self, body: EmbeddingsBody, request: Request) -> Response:
        """Embed a text, or several."""
        generation = self._generation
        asked = generation.fields(body, request) | {"pooling": self._pooling()}
        name, model = f"embd-{uuid.uuid4().hex}", generation.asked(body.model)
        with fields_as_sent(_AS_SENT):
            prompts = prompts_of(body.input)
            generation.check_number(len(prompts), subject="input")
            requests = [{"id": f"{name}-{at}", **each, **asked} for at, each in enumerate(prompts)]
            facts = generation.llm.facts
            # No facts means no engine, and the request will be refused.
            if body.dimensions is not None and facts is not None:
                check_dimensions(body.dimensions, facts.hidden_size)
            answers = await generation.ask(requests, name, request)
            return await generation.respond_whole(answers, EmbeddingList(answers, body, model), request)

    def _pooling(self) -> str:
        pooling = self._generation.llm.recipe.model.pooling
        if pooling == "none":
            raise BadRequest("model", "serves no embeddings: its recipe has no model.pooling")
        return pooling


class EmbeddingList:
    """The JSON form of embeddings (a `WholeForm`)."""

    def __init__(self, answers: Sequence[AnswerStream], body: EmbeddingsBody, model: str) -> None:
        self._answers = answers
        self._body = body
        self._model = model

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take nothing: the answers themselves hold their embeddings."""

    def whole(self) -> Iterator[bytes]:
        """Yield the bytes of the whole response."""
        # All are looked for now, since nothing can be refused once the first bytes are sent
        found = [embedding_of(each) for each in self._answers]
        entries = (
            {"object": "embedding", "index": at, "embedding": self._written(each)}
            for at, each in enumerate(found)
        )
        head = {"object": "list", "model": self._model, "usage": usage_of(self._answers)}
        yield from pieces_of({**head, "data": Parts(entries)})

    def _written(self, embedding: Vector) -> Any:
        vector = unit(embedding, self._body.dimensions)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()


def check_dimensions(dimensions: int, most: int) -> None:
    """Raise BadRequest unless `dimensions` is between 1 and `most`."""
    allowed = integers(1, most)
    if dimensions not in allowed:
        raise BadRequest("dimensions", value=dimensions, limit=str(allowed))


def embedding_of(answer: AnswerStream) -> Vector:
    """Return the embedding of an answer that has ended; raises RequestFailed if it ended without one."""
    if answer.embedding is None:
        raise RequestFailed("a text took longer than timeout_s or the queue's limit: send fewer at once")
    return answer.embedding


def usage_of(answers: Sequence[AnswerStream]) -> Json:
    """Return the token counts of some prompts, as `usage` reports them."""
    num_tokens = sum(each.request.num_prompt_tokens for each in answers)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, **answers[0].weights_usage}
