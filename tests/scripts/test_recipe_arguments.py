"""Everything that takes a recipe takes it in the same way."""

from __future__ import annotations

import inspect
from functools import partial

import pytest

from benchmark.verbs import BENCHMARKS, SIMULATIONS, parser_of
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from scripts import generate, serve
from serving.async_llm import AsyncLLM
from serving.llm import LLM
from tests.each_of import each_of

TINY = "recipes/tiny/cpu.yaml"
GIVEN = [TINY, "cache.page_size=8", "--profile", "low_latency", "cache.num_pages=9"]


NEEDED = {  # what else a verb must be given
    "offline": ["--trace", "a"],
    "beside": ["--trace", "a"],
    "": ["--trace", "a", "--device", "h200"],
    "search": ["--trace", "a", "--device", "h200", "--ttft-ms", "1", "--itl-ms", "1"],
    "routes": ["--trace", "a", "--dp", "2"],
    "splits": ["--trace", "a", "--split", "1:1"],
}
PARSERS = {
    f"{prog} {each.title}": (partial(parser_of, each, prog), NEEDED.get(each.title, []))
    for prog, verbs in (("benchmark", BENCHMARKS), ("simulate", SIMULATIONS))
    for each in verbs
    if each.takes_recipe
}
PARSERS |= {"generate": (generate.parser, ["--prompt", "a"]), "serve": (serve.parser, [])}


@each_of("verb", PARSERS)
def test_every_verb_takes_a_recipe_overrides_and_a_profile(verb: str) -> None:
    parser, others = PARSERS[verb]
    options = parser().parse_intermixed_args([*GIVEN, *others])
    assert options.recipe == TINY
    assert list(options.overrides) == ["cache.page_size=8", "cache.num_pages=9"]
    assert options.profile == "low_latency"


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
