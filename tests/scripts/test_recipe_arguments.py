"""Everything that takes a recipe takes it in the same way."""

from __future__ import annotations

import inspect

import pytest

from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from serving.async_llm import AsyncLLM
from serving.llm import LLM

TINY = "recipes/tiny/cpu.yaml"


def test_both_classes_of_the_python_api_are_made_alike() -> None:
    one, other = (inspect.signature(each.__init__).parameters for each in (LLM, AsyncLLM))
    for name in one:
        assert (one[name].kind, one[name].default) == (other[name].kind, other[name].default), name
    others = [other[name] for name in other if name not in one]
    assert all(each.kind is each.KEYWORD_ONLY and each.default is None for each in others)


def test_one_text_is_one_override_and_is_not_read_letter_by_letter() -> None:
    llm = AsyncLLM(TINY, "cache.page_size=8", profile="low_latency")
    assert (llm.recipe.cache.page_size, llm.recipe.scheduler.num_slots) == (8, 32)
    llm._threads.shutdown()
    with pytest.raises(RecipeError, match=r"the overrides are one text, 'cache.page_size=8'; give a list"):
        load(TINY, "cache.page_size=8")
