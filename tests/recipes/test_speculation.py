"""What may a recipe say of drafts, and what becomes of it?"""

from __future__ import annotations

import pytest

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.source import Source
from continuous_batching.speculation.throughput import Throughput
from recipes.build.scheduler import SchedulerLimits, facts_of, scheduler_from, scheduler_of
from recipes.build.speculation import PROPOSERS, lengths_of
from recipes.schema.keys import keys_of
from recipes.schema.reader import load
from recipes.schema.recipe import CacheSection, SchedulerSection
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import SpeculationSection

TINY = "recipes/tiny/cpu.yaml"
LIMITS = SchedulerLimits(64, 0, 100, 10, (), None)
ASKED = SchedulerSection(num_slots=4, max_batch_tokens=32)


def test_nothing_is_guessed_unless_it_is_asked_for() -> None:
    assert load(TINY).speculation == SpeculationSection(kind="none", max_tokens=4)
    assert scheduler_of(ASKED, CacheSection(num_pages=64), LIMITS).speculation is None


def test_who_guesses_is_built_and_recorded() -> None:
    asked = load(TINY, ["speculation.kind=ngram", "speculation.max_tokens=9"]).speculation
    made = scheduler_of(ASKED, CacheSection(num_pages=64), LIMITS, asked).speculation
    again = scheduler_from(facts_of(ASKED, CacheSection(num_pages=64), LIMITS, asked)).speculation
    for each in (made, again):
        assert each is not None
        assert each.most == 9
        assert isinstance(each.lengths, Throughput)
        assert isinstance(each._proposer, PROPOSERS["ngram"])


def test_every_choice_can_be_built() -> None:
    choices = {key.name: set(key.choices) for key in keys_of(SpeculationSection)}
    assert choices["kind"] == {"none", *PROPOSERS}
    slots = SlotPool(4, 64, 16)
    made = {each: lengths_of(SpeculationSection(adaptive=each), slots) for each in choices["adaptive"]}
    kinds = {"throughput": Throughput, "source": Source, "fixed": Fixed}
    assert {name: type(each) for name, each in made.items()} == kinds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "speculation.kind=ngrams",
            "'ngrams' is not allowed; it must be none, ngram or suffix; did you mean ngram?",
        ),
        ("speculation.max_tokens=0", "0 is not allowed; it must be an integer from 1 to 64"),
        ("speculation.window=9", "read by adaptive: source alone, and adaptive is throughput"),
        (
            "speculation.accept_threshold=0.7",
            "biases answers towards the guesses; leave it out: a guess counts",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(TINY, ["speculation.kind=ngram", override])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_npu_takes_no_more_than_its_attention() -> None:
    npu = ["device.kind=npu", "device.virtual=true", "speculation.kind=ngram"]
    on_npu = "recipes/tiny/npu.yaml"
    assert load(on_npu, [*npu, "speculation.max_tokens=15"]).speculation.max_tokens == 15
    assert load(on_npu, ["speculation.max_tokens=16"]).speculation.kind == "none"
    with pytest.raises(RecipeError, match=r"16 guesses .* are 17 query tokens, .* takes 16 .* set it to 15"):
        load(on_npu, [*npu, "speculation.max_tokens=16"])


def test_lengths_of_the_source_stand_in_their_order() -> None:
    with pytest.raises(RecipeError, match="5 guesses are not from 0 to 4"):
        load(TINY, ["speculation.adaptive=source", "speculation.base_tokens=5"])
    with pytest.raises(RecipeError, match="2 guesses are not from 3 to 4"):
        load(TINY, ["speculation.adaptive=source", "speculation.base_tokens=2", "speculation.min_tokens=3"])
