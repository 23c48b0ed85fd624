"""Ask a model how well a document matches a query, as a question with two possible answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
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
