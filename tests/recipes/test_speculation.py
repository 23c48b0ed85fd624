"""Each kind of drafts that a recipe may ask for is built, and every other choice is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Source, Throughput
from continuous_batching.speculation.proposer import model_spans
from continuous_batching.step_time import StepTime
from recipes.assembly.engine import build
from recipes.assembly.families import draft_config, model_config
from recipes.assembly.memory_plan import report
from recipes.assembly.scheduler import SchedulerLimits, facts_of, scheduler_from, scheduler_of
from recipes.assembly.speculation import PROPOSERS, lengths_of
from recipes.schema.keys import keys_of
from recipes.schema.reader import load
from recipes.schema.recipe import CacheSection, SchedulerSection
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import GUESSING, SpeculationSection

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
    assert choices["kind"] == {"none", *PROPOSERS} == {"none", *GUESSING}
    slots, step_time = SlotPool(4, 64, 16), StepTime()
    made = {
        each: lengths_of(SpeculationSection(adaptive=each), slots, step_time) for each in choices["adaptive"]
    }
    kinds = {"throughput": Throughput, "source": Source, "fixed": Fixed}
    assert {name: type(each) for name, each in made.items()} == kinds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("speculation.kind=ngrams", "'ngrams' is not allowed; it must be none, ngram, suffix, draft, eagle3"),
        ("speculation.max_tokens=0", "0 is not allowed; it must be an integer from 1 to 64"),
        ("speculation.window=9", "read by adaptive: source alone, and adaptive is throughput"),
        ("speculation.accept_threshold=0.7", "biases answers towards the guesses; leave it out: a guess"),
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
    with pytest.raises(RecipeError, match=r"16 guesses .* are 17 query tokens, .* takes 16 .* set it to 15"):
        load(on_npu, [*npu, "speculation.max_tokens=16"])


def test_lengths_of_the_source_stand_in_their_order() -> None:
    asked = ["speculation.kind=ngram", "speculation.adaptive=source"]
    with pytest.raises(RecipeError, match="5 guesses are not from 0 to 4"):
        load(TINY, [*asked, "speculation.base_tokens=5"])
    with pytest.raises(RecipeError, match="2 guesses are not from 3 to 4"):
        load(TINY, [*asked, "speculation.base_tokens=2", "speculation.min_tokens=3"])


@pytest.mark.parametrize("key", ["max_tokens=5", "adaptive=fixed", "base_tokens=2", "window=9"])
def test_how_guesses_are_checked_is_refused_where_nobody_guesses(key: str) -> None:
    words = r"read only where speculation\.kind is not none, and it is none; set that, or leave this out"
    with pytest.raises(RecipeError, match=words):
        load(TINY, [f"speculation.{key}"])
    with pytest.raises(RecipeError, match="not none"):
        load(TINY, [f"speculation.{key}", "speculation.kind=none"])


DRAFT = ["speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft"]


def test_a_draft_model_is_built_beside_the_model() -> None:
    plain, drafted = (build(load(TINY, ["device.threads=1", *more])) for more in ([], DRAFT))
    assert plain.runner.drafter is None
    drafter = drafted.runner.drafter
    assert drafter is not None
    assert drafter.decoder.config.num_layers < drafted.config.num_layers
    assert drafter.decoder.config.dtype == "float32"  # the model's own
    held, of_drafts = (
        sum(tensor.nbytes for tensor in cache.tensors) for cache in (drafted.runner.cache, drafter.cache)
    )
    assert held == drafted.memory.cache_bytes
    assert held - of_drafts == plain.memory.cache_bytes
    weights = sum(each.weight_bytes for each in (drafted.config, drafter.decoder.config))
    assert drafted.memory.weight_bytes - plain.memory.weight_bytes > weights - plain.config.weight_bytes - 1
    lines = dict(report(load(TINY, DRAFT), drafted.config, drafted.memory))
    assert lines["draft model"].startswith("llama, ")
    speculation = drafted.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.spans is model_spans


def test_a_draft_model_has_a_type_of_its_own() -> None:
    typed = load(TINY, [*DRAFT, "speculation.draft_dtype=bfloat16", "speculation.draft_quantization=w8a8"])
    config = model_config(typed)
    draft = draft_config(typed, config)
    assert draft is not None
    assert (config.dtype, config.quantization) == ("float32", None)
    assert draft.dtype == "bfloat16"
    assert draft.quantization is not None


def test_where_a_draft_model_comes_from_is_not_recorded() -> None:
    asked = load(TINY, DRAFT).speculation
    facts = facts_of(ASKED, CacheSection(num_pages=64), LIMITS, asked)
    assert not [name for name in facts["speculation"] if name.startswith("draft")]
    again = scheduler_from(facts).speculation
    assert again is not None
    assert again.spans is model_spans


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speculation.kind=draft"], "speculation.draft_path: required where speculation.kind is draft"),
        ([DRAFT[1]], "read only where speculation.kind is draft or eagle3, and it is none; leave it out"),
        (["speculation.kind=ngram", "speculation.draft_dtype=float16"], "and it is ngram; leave it out"),
        ([*DRAFT[:1], "speculation.draft_path=recipes/tiny/nowhere"], "config.json does not exist; give the"),
        (
            [*DRAFT, "speculation.max_tokens=16", "device.kind=npu", "device.virtual=true"],
            "set it to 15 or less",
        ),
    ],
)
def test_a_draft_model_that_cannot_be_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        build(load(TINY, overrides))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 999}, "has a vocabulary of 999 tokens, and the model one of 1024; name a smaller"),
        ({"max_position_embeddings": 90}, "the draft model has 90 positions, and a request up to"),
        ({"model_type": "mamba"}, "the model's family is 'mamba'"),
        ({}, "holds neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_in_one_line(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    config = json.loads(Path("recipes/tiny/draft/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(RecipeError) as refused:
        build(load(TINY, [DRAFT[0], f"speculation.draft_path={tmp_path}"]))
    assert refused.value.keys[0] == "speculation.draft_path"
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
