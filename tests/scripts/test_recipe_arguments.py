"""Does everything that takes a recipe take it in the same way?"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable

import pytest

from benchmark.simulate import command_line
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from scripts import generate, serve
from serving.async_llm import AsyncLLM
from serving.llm import LLM

TINY = "recipes/tiny/cpu.yaml"
GIVEN = [TINY, "cache.page_size=8", "--profile", "low_latency", "cache.num_pages=9"]


def of_benchmark(name: str) -> Callable[[], argparse.ArgumentParser]:
    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        importlib.import_module(f"benchmark.{name}").add_arguments(made)
        return made

    return parser


PARSERS = {
    "generate": (generate.parser, ["--prompt", "a"]),
    "serve": (serve.parser, []),
    "simulate": (lambda: command_line.serve_parser(""), ["--trace", "a", "--device", "h200"]),
    "search": (
        command_line.search_parser,
        ["--trace", "a", "--device", "h200", "--ttft-ms", "1", "--itl-ms", "1"],
    ),
    "held-out": (command_line.held_out_parser, ["--train", "a", "--held", "b"]),
    "offline": (of_benchmark("offline.offline"), ["--trace", "a"]),
    "throughput": (of_benchmark("offline.throughput"), []),
    "latency": (of_benchmark("offline.latency"), []),
    "stall": (of_benchmark("offline.stall"), []),
    "device": (of_benchmark("micro.device"), []),
}


@pytest.mark.parametrize("verb", PARSERS)
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
