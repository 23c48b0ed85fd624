"""An engine over several ranks gives the tokens of one rank, whatever happens meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams, packed_ids
from models.parallel.group import Alone
from recipes.__main__ import show
from recipes.assembly.engine import BuiltEngine, assemble, build
from recipes.assembly.families import draft_config, share_of
from recipes.assembly.memory_plan import report
from recipes.assembly.sizing import plan_memory
from recipes.cluster.rank_process import common, restored
from recipes.cluster.ranks import recipe_of_a_rank
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of
from tests.recipes.published import QWEN3_30B_A3B
from tests.serving.server import TINY
from tests.thorough import cases

pytestmark = [pytest.mark.in_order, pytest.mark.usefixtures("forked_ranks")]

# Few pages and a small host tier: requests preempt each other, and are swapped or computed again
CROWDED = (
    *("cache.num_pages=40", "cache.page_size=4", "cache.host_gib=0.001", "scheduler.num_slots=6"),
    *("cache.compact_every_steps=3", "cache.compact_pages_per_step=2", "scheduler.queue=priority"),
    *("scheduler.max_request_tokens=120", "scheduler.max_batch_tokens=32", "scheduler.outrank=true"),
)
CPU = ("device.compile=false", "device.threads=1")
DRAFT = ("speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft")
TENSOR, STAGES = "parallel.tensor=2", "parallel.pipeline=2"
# Tensor ranks and stages, with steps that overlap and without, each with and without guesses
FEW: dict[str, tuple[str, ...]] = {
    "guesses": (TENSOR, "scheduler.overlap=true", "speculation.kind=ngram"),
    "stages": (STAGES,),
    "stages of two, drafts": (STAGES, TENSOR, *DRAFT),
    "uneven stages, guesses": ("parallel.pipeline=3", "scheduler.overlap=true", "speculation.kind=suffix"),
}
WAYS = FEW | cases(
    {},
    {
        "plain": (TENSOR,),
        "drafts": (TENSOR, *DRAFT),
        "overlap": (TENSOR, "scheduler.overlap=true"),
        "stages, guesses": (STAGES, "scheduler.overlap=true", "speculation.kind=suffix"),
        "uneven stages": ("parallel.pipeline=3",),
        "stages of two": (STAGES, TENSOR),
        "stages, drafts": (STAGES, *DRAFT),
        "uneven stages, drafts": ("parallel.pipeline=3", *DRAFT),
    },
)
QUICK = ("stages",)


def engine(*changes: str) -> BuiltEngine:
    return build(load(TINY, [*CROWDED, *CPU, *changes]))


def requests(random: np.random.Generator, number: int) -> list[Request]:
    """Requests that begin alike and answer themselves, with everything that chooses tokens."""
    beginnings = [random.integers(300, 700, 30).tolist() for _ in range(2)]
    found = []
    for index in range(number):
        own = random.integers(300, 700, int(random.integers(1, 9))).tolist() * int(random.integers(1, 4))
        prompt = beginnings[int(random.integers(2))][: int(random.integers(0, 30))] + own
        params = SamplingParams(
            max_tokens=int(random.integers(1, 24)),
            temperature=float(random.choice([0.0, 0.8, 1.5])),
            top_p=float(random.choice([1.0, 0.8])),
            top_k=int(random.choice([0, 9])),
            frequency_penalty=float(random.choice([0.0, 0.7])),
            seed=int(random.integers(1000)),
            ignore_eos=True,
            logprobs=int(random.choice([0, 2])) or None,
            prompt_logprobs=int(random.choice([0, 0, 1])) or None,
            # Their ranks are told of them alone that they are there
            allowed_token_ids=packed_ids(range(300, 700)) if random.random() < 0.2 else None,
        )
        found.append(Request(f"{index}", np.array(prompt), params, priority=int(random.integers(3))))
    return found


def served(engine: Engine, asked: list[Request], random: np.random.Generator) -> dict[str, list[int]]:
    """The answer of each request that was not aborted; how many may be is drawn before any step is timed."""
    to_come, answers = list(asked), {}
    doomed = {each.id for each in asked if random.random() < 0.2}
    most = engine.scheduler.pool.num_pages
    while to_come or engine.has_work:
        if to_come and random.random() < 0.5:
            engine.add(to_come.pop())
        running = [each.id for each in engine.slots.requests[engine.slots.busy] if each.id in doomed]
        if random.random() < 0.1 and running:
            engine.abort(str(random.choice(running)))
        if random.random() < 0.04:
            engine.resize(most - int(random.integers(0, 3)), "running")
        step = engine.step()
        for request in step.finished if step else []:
            answers[request.id] = request.answer.tolist()
    engine.resize(most)
    return answers


@pytest.fixture(scope="module")
def expected() -> Callable[[int], dict[str, list[int]]]:
    """The answers of one rank by the seed of their schedule, each computed once."""
    alone = engine().engine

    @cache
    def of(seed: int) -> dict[str, list[int]]:
        return served(alone, requests(np.random.default_rng(seed), 10), np.random.default_rng(seed))

    return of


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in QUICK)],
)
def together(request: pytest.FixtureRequest) -> Iterator[BuiltEngine]:
    built = engine(*WAYS[request.param])
    yield built
    built.engine.observer.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, cases(3, 130), 13))
def test_several_ranks_give_the_tokens_of_one(
    expected: Callable[[int], dict[str, list[int]]], together: BuiltEngine, first: int
) -> None:
    seeds = range(first, first + cases(3, 13))
    compared = 0
    for seed in seeds:
        found = served(
            together.engine, requests(np.random.default_rng(seed), 10), np.random.default_rng(-seed % 97)
        )
        both = expected(seed).keys() & found.keys()
        assert {name: found[name] for name in both} == {name: expected(seed)[name] for name in both}, seed
        compared += len(both)
    assert compared >= 5 * len(seeds)
    counters = together.engine.scheduler.counters
    assert counters.preemptions > 0 or together.engine.scheduler.depth > 1  # which spreads what is wanted
    assert counters.hit_tokens > 0
    assert counters.compacted_pages > 0
    assert counters.accepted_tokens > 0 or together.engine.scheduler.speculation is None


@each_of(
    "change, words",
    [
        ("parallel.pipeline=5", "parallel.pipeline: 5 stages have 4 layers; choose a number from 1 to 4"),
        ("parallel.tensor=3", "parallel.tensor: 3 tensor ranks cannot share .*; choose one of 1, 2"),
        ("parallel.expert=2", "parallel.expert: the model has no experts to spread over 2 parts"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused_by_their_key(change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(load(TINY, [TENSOR, change]))


@pytest.mark.parametrize("changes", [(), ("parallel.nodes=[a,b]", "server.model_names=[x]", *DRAFT)])
def test_a_rank_is_told_the_whole_recipe(changes: tuple[str, ...]) -> None:
    recipe = load(TINY, [*CPU, *changes])
    assert restored(json.dumps(recipe.described())) == recipe


class Poorer(Alone):
    """The group of a rank beside one that has room for less."""

    def least(self, value: int, device: torch.device) -> int:
        return min(value, 90)


def test_machines_with_other_numbers_of_cores_agree_on_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recipe, told = load(TINY, ["parallel.tensor=2"]), []
    for cores in (4, 8):
        monkeypatch.setattr("recipes.cluster.ranks.usable_cores", lambda cores=cores: cores)
        own = recipe_of_a_rank(recipe, 1)
        assert own.device.threads == cores
        told.append(common(own))
    assert told[0] == told[1] == common(recipe)


def test_ranks_divide_the_cores_unless_the_environment_says_their_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load(TINY, ["parallel.tensor=2"])
    monkeypatch.setattr("recipes.cluster.ranks.usable_cores", lambda: 8)
    monkeypatch.setattr("recipes.cluster.ranks.USUAL_THREADS", 3)  # as torch has read it
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert recipe_of_a_rank(recipe, 2).device.threads == 3
    asked = load(TINY, ["parallel.tensor=2", "device.threads=5"])
    assert recipe_of_a_rank(asked, 2).device.threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert recipe_of_a_rank(recipe, 2).device.threads == 4


def test_all_ranks_take_the_pages_that_the_least_of_them_has_room_for() -> None:
    recipe = load(TINY, [*CPU, "cache.num_pages=null", "cache.memory_gib=0.01", "cache.host_gib=0.01"])
    rich, poor = assemble(recipe), assemble(recipe, Poorer())
    assert min(rich.memory.num_pages, rich.memory.num_host_pages) > 90
    scheduler, memory = poor.engine.scheduler, poor.memory
    assert scheduler.host_pool is not None
    assert scheduler.pool.num_pages == poor.runner.cache.num_pages[0] == memory.num_pages == 90
    assert scheduler.host_pool.num_pages == memory.num_host_pages == 90
    assert memory.cache_tokens == 89 * poor.engine.slots.page_size + 1


def test_the_plan_of_a_rank_is_of_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for ranks in (1, 2):
        show(TINY, [f"parallel.tensor={ranks}"])
        lines = capsys.readouterr().out.splitlines()
        shown.append(dict(line.split("  ", 1) for line in lines if "  " in line))
    alone, of_two = ({key: value.strip() for key, value in each.items()} for each in shown)
    assert "ranks" not in alone
    assert of_two["ranks"] == "2; what follows is of each, with a device of its own"
    assert (alone["weights"], of_two["weights"]) == ("8.3 MiB", "4.5 MiB")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (2, "64 whole experts of a layer, divided by 2 ranks, 13.50 GiB a rank: 0 to 63 on 0 to 1, 64 to "),
        (4, "32 whole experts of a layer, 13.50 GiB a rank: 0 to 31 on 0, 32 to 63 on 1, 64 to 95 on 2, "),
    ],
)
def test_the_plan_says_which_experts_lie_where(
    parts: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    changes = ["device.kind=npu", "device.virtual=true", "cache.host_gib=0", "device.memory_gib=60"]
    of_cpu = ["device.compile=false", "device.threads=null", "model.dtype=bfloat16"]
    show(TINY, [f"model.path={tmp_path}", "parallel.tensor=4", f"parallel.expert={parts}", *changes, *of_cpu])
    (said,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("spread"))
    assert said.split(maxsplit=1)[1].startswith(line)


def test_the_plan_of_stages_is_of_the_last_which_has_the_most_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(TINY, ["parallel.pipeline=3"])
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert shown["stages"].strip() == "3, of 1 and 1 and 2 layers; what follows is of number 3"
    assert shown["a page"].endswith(" over 2 layers")


def test_a_drafter_is_in_the_plan_of_the_last_stage_alone() -> None:
    recipe, found = load(TINY, [*CPU, STAGES, *DRAFT]), []
    draft = draft_config(recipe, share_of(recipe, 0)[0])
    assert draft is not None
    for rank in range(2):  # the last stage has the first rank, and each stage has two layers
        config, share = share_of(recipe, rank)
        plan = plan_memory(recipe, config, share=share)
        rows = dict(report(recipe, config, plan, share))
        found.append(("draft model" in rows, rows["a page"], plan.weight_bytes))
    assert found[0][:2] == (True, "16 tokens, 64.0 KiB over 4 layers")
    assert found[1][:2] == (False, "16 tokens, 32.0 KiB over 2 layers")
    assert found[0][2] - found[1][2] >= draft.weight_bytes
