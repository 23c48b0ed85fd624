"""Serve `POST /score` and `POST /rerank`: how well documents match a query.

A score comes either from the model's answer to a question about each pair, or from the cosine of two
embeddings; the recipe decides which.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from borders.refusal import BadRequest
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from serving.answers.answers import AnswerDelta, AnswerStream, unit
from serving.api.embeddings import embedding_of, usage_of
from serving.api.generation import Generation, fields_as_sent
from serving.api.pieces import Json, to_json
from serving.api.schemas import Ignored, RequestBody, Strings, takes
from serving.text.tokenizer import Text

_MARK = re.compile(r"\{(query|document)\}")
_NUM_ANSWERS = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A chat turn about a pair of texts, and the tokens that answer it; the first of them means yes."""

    question: str
    system: str | None
    answers: tuple[int, ...]

    @staticmethod
    def of(recipe: Recipe, text: Text | None) -> Question | None:
        """Return a recipe's question, or None without one.

        Raises RecipeError for a question that cannot be asked.
        """
        asked, answers = recipe.server.score_question, recipe.server.score_answers
        if asked is None:
            return None
        if {*_MARK.findall(asked)} != {"query", "document"}:
            fix = "write {query} and {document} where the texts are to stand"
            raise RecipeError("server.score_question", "has no place for both texts", fix, value=asked)
        if text is None or not text.has_chat_template:
            fix = "leave it out, or name a model.path with a tokenizer and a chat template"
            raise RecipeError(
                "server.score_question", "needs a chat template, which the model does not have", fix
            )
        tokens = [text.encode_within(each) for each in answers]
        if len(tokens) != _NUM_ANSWERS or any(len(each) != 1 for each in tokens):
            found = ", ".join(f"{each!r} of {len(ids)} tokens" for each, ids in zip(answers, tokens))
            fix = "name two words that are tokens of this model"
            raise RecipeError("server.score_answers", f"are {found}", fix, value=answers)
        return Question(asked, recipe.server.score_system, tuple(ids[0] for ids in tokens))

    def fields(self, query: str, document: str) -> dict[str, Any]:
        """Return the fields of the request that asks about two texts."""
        texts = {"query": query, "document": document}
        content = _MARK.sub(lambda mark: texts[mark[1]], self.question)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {
            "messages": [*system, {"role": "user", "content": content}],
            "reasoning_effort": "none",
            "pooling": "last",
            "label_token_ids": list(self.answers),
        }


Pairs = Sequence[tuple[str, str]]


@takes("scores")
class ScoreBody(RequestBody):
    """The body of `POST /score`."""

    ignored: ClassVar[Ignored] = {}
    apart = frozenset({"text_1", "text_2"})
    text_1: str | Strings = Field(description="a query, or as many as there are documents")
    text_2: str | Strings = Field(description="a document, or several")

    def pairs(self) -> Pairs:
        """Return the pairs of query and document to score."""
        queries, documents = (
            [each] if isinstance(each, str) else each for each in (self.text_1, self.text_2)
        )
        if len(queries) not in (1, len(documents)):
            problem = f"has {len(queries)} texts and text_2 {len(documents)}; it must have one, or as many"
            raise BadRequest("text_1", problem)
        return [*zip(queries * len(documents) if len(queries) == 1 else queries, documents)]


@takes("scores")
class RerankBody(RequestBody):
    """The body of `POST /rerank`."""

    ignored: ClassVar[Ignored] = {}
    apart = frozenset({"query", "documents", "top_n", "return_documents"})
    query: str
    documents: list[Any] = Field(description='texts, or {"text": ...}')
    top_n: int | None = Field(None, description="show so many, the best first; null or 0: all")
    return_documents: bool | None = Field(None, description="show their texts too; null: true")

    def pairs(self) -> Pairs:
        """Return the pairs of query and document to score."""
        if self.top_n is not None and self.top_n < 0:
            raise BadRequest("top_n", value=self.top_n, limit="0 (all) or more")
        return [(self.query, _text_of(at, each)) for at, each in enumerate(self.documents)]


class Judge(Protocol):
    """A way to score pairs of texts."""

    def requests(self, pairs: Pairs) -> list[dict[str, Any]]:
        """Return the fields of the requests to send to the engine."""
        ...

    def scores(self, pairs: Pairs, answers: Sequence[AnswerStream]) -> list[float]:
        """Return a score for each pair, computed from the answers to those requests."""
        ...


class AskedJudge:
    """Asks the model about each pair of texts.

    The score is the probability of the first answer relative to both answers.
    """

    def __init__(self, question: Question) -> None:
        self._question = question

    def requests(self, pairs: Pairs) -> list[dict[str, Any]]:
        """Return a request for each pair."""
        return [self._question.fields(*pair) for pair in pairs]

    def scores(self, pairs: Pairs, answers: Sequence[AnswerStream]) -> list[float]:
        """Return scores from 0 to 1."""
        logprobs = np.array([embedding_of(each) for each in answers], dtype=np.float64)
        scores: list[float] = (1 / (1 + np.exp(logprobs[:, 1] - logprobs[:, 0]))).tolist()
        return scores


class CosineJudge:
    """Compares the embeddings of the texts; each text is embedded once."""

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling

    def requests(self, pairs: Pairs) -> list[dict[str, Any]]:
        """Return a request for each distinct text."""
        return [{"prompt": each, "pooling": self._pooling} for each in _texts(pairs)]

    def scores(self, pairs: Pairs, answers: Sequence[AnswerStream]) -> list[float]:
        """Return scores from -1 to 1."""
        found = dict(zip(_texts(pairs), (unit(embedding_of(each)) for each in answers)))
        return [float(found[query] @ found[document]) for query, document in pairs]


class ScoreRoutes:
    """The routes for scores, which refuse every request if the recipe defines no way to score."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        recipe = generation.llm.recipe
        question = Question.of(recipe, generation.llm.text)
        self._judge: Judge | None = None
        if question is not None:
            self._judge = AskedJudge(question)
        elif recipe.model.pooling != "none":
            self._judge = CosineJudge(recipe.model.pooling)

    def by_path(self) -> dict[str, Callable[..., Awaitable[Response]]]:
        """Return the routes by each path under which clients know them."""
        scores = dict.fromkeys(("/score", "/v1/score"), self.score)
        return {**scores, **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), self.rerank)}

    async def score(self, body: ScoreBody, request: Request) -> Response:
        """Score each pair of texts."""
        return await self._judged(body, body.pairs(), "score", request)

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """Sort documents by how well they match a query."""
        return await self._judged(body, body.pairs(), "rerank", request)

    async def _judged(
        self, body: ScoreBody | RerankBody, pairs: Pairs, kind: str, request: Request
    ) -> Response:
        generation, judge, named = self._generation, self._judge, list(_FIELDS[kind])
        if judge is None:
            problem = "scores no texts: its recipe has neither server.score_question nor model.pooling"
            raise BadRequest("model", problem)
        if isinstance(judge, AskedJudge) and body.truncate_prompt_tokens is not None:
            problem = "would cut texts out of the question that server.score_question asks"
            fix = "leave it out, and send shorter documents"
            raise BadRequest("truncate_prompt_tokens", problem, fix=fix)
        if not pairs:
            raise BadRequest(named[-1], "is empty; it must hold at least one text")
        shared, name = generation.fields(body, request), f"{kind}-{uuid.uuid4().hex}"
        asked = [{"id": f"{name}-{at}", **each, **shared} for at, each in enumerate(judge.requests(pairs))]
        with fields_as_sent(dict.fromkeys(("prompt", "messages"), named[-1])):
            generation.check_number(len(asked), subject=" and ".join(named))
            answers = await generation.ask(asked, name, request)
            head = {"id": name, "model": generation.asked(body.model)}
            return await generation.respond_whole(answers, Scores(answers, judge, body, pairs, head), request)


class Scores:
    """The JSON form of scores (a `WholeForm`)."""

    def __init__(
        self,
        answers: Sequence[AnswerStream],
        judge: Judge,
        body: ScoreBody | RerankBody,
        pairs: Pairs,
        head: dict[str, str],
    ) -> None:
        self._answers, self._judge, self._body, self._pairs = answers, judge, body, pairs
        self._head = head

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take nothing: the answers themselves hold what the scores are computed from."""

    def whole(self) -> Iterator[bytes]:
        """Yield all scores.

        They are in the order of the pairs for `/score`; `/rerank` puts the best documents first.
        """
        scores, body = self._judge.scores(self._pairs, self._answers), self._body
        response: Json = {**self._head, "usage": usage_of(self._answers)}
        if isinstance(body, ScoreBody):
            response |= {"object": "list", "created": int(time.time())}
            response["data"] = [
                {"index": at, "object": "score", "score": each} for at, each in enumerate(scores)
            ]
        else:
            best = sorted(range(len(scores)), key=lambda at: -scores[at])
            response["results"] = [
                {"index": at, "relevance_score": scores[at]}
                | ({} if body.return_documents is False else {"document": {"text": self._pairs[at][1]}})
                for at in best[: body.top_n or None]
            ]
        yield to_json(response)


_FIELDS = {"score": ("text_1", "text_2"), "rerank": ("query", "documents")}


def _texts(pairs: Pairs) -> list[str]:
    """Return each distinct text once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def _text_of(at: int, document: object) -> str:
    text = document.get("text") if isinstance(document, dict) and document.keys() == {"text"} else document
    if not isinstance(text, str):
        raise BadRequest("documents", value=document, limit='a text, or {"text": ...}', place=f"[{at}]")
    return text
