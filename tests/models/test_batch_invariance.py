"""With device.batch_invariant on a CPU, a token's logits have the same bits in any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams
from devices.cpp_sources import missing_for_sources
from kv_cache.states import GRID
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Products, products
from recipes import machine
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.models.families import VARIANTS, VOCABULARY, make
from tests.models.mtp_layers import target_beside
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.variants import Variant
from tests.thorough import THOROUGH, cases, first_quick

needs_compiler = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))
ANY = ROOT / "recipes/any/cpu.yaml"
NUM_REQUESTS, NUM_NEW = 6, cases(20, 30)
NUM_SCHEDULES, IN_ONE_TEST = cases(2, 500), 50  # all of them would outlast the limit of a test
VARIANT = Variant(
    "qwen3_window",
    "qwen3",
    {
        "hidden_size": 72,
        "intermediate_size": 101,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
)


STATES = {each.name: each for each in RECURRENT_VARIANTS}
WHOLE = {"head_dim": 32}  # which C++ reads
PLAIN = (
    "llama_dynamic_new",
    "qwen3_layer_types",
    "glm4",
    "gemma2_layer_types",
    "gemma3",
    "hunyuan",
    "phi3_part",
)
IN_HALVES = ("qwen3_layer_types", "phi3_part")  # how a layer is joined does not hang on the type
FULL = (5, 2)  # schedules that together have hits, preemptions and drafts


@dataclass(frozen=True)
class Case:
    """A checkpoint, what is said of it, what its drafts come from, and at what tokens a prompt may be cut."""

    checkpoint: str
    overrides: list[str]
    drafts: str = "ngram"
    grid: int = 1
    few: Sequence[int] = FULL  # the schedules that are run where time matters

    def seeds(self, first: int) -> Sequence[int]:
        return range(first, min(first + IN_ONE_TEST, NUM_SCHEDULES)) if THOROUGH else self.few

    def requests(self) -> list[Request]:
        return requests(max(40, self.grid + 6))


CASES = {
    "float32": Case("qwen3_window", ["model.dtype=float32"]),
    "bfloat16": Case("qwen3_window", ["model.dtype=bfloat16"]),
    "int8 pages": Case("qwen3_window", ["model.dtype=float32", "cache.dtype=int8"]),
    "qwen3_5": Case("qwen3_5", ["model.dtype=float32"], "mtp", GRID, (5,)),
    "qwen3_next": Case("qwen3_next", ["model.dtype=bfloat16"], "suffix", GRID, (5,)),
    "kimi_linear": Case("kimi_linear", ["model.dtype=float32"], "suffix", GRID, (5,)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a checkpoint, once; a Qwen3.5 has a layer to predict further tokens."""

    @cache
    def made(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        if name == VARIANT.name:
            return make(VARIANT, root)[1]
        variant = STATES[name]
        if name != "kimi_linear":
            variant = replace(variant, options=variant.options | WHOLE)
        return (target_beside(name, root, variant) if name == "qwen3_5" else make(variant, root))[1]

    return made


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests(num_shared: int = 40) -> list[Request]:
    """Return requests of which every other one begins alike, and the last one asks what another asks."""
    rng, made = np.random.default_rng(3), []
    opening = rng.integers(0, VOCABULARY, num_shared)
    for number in range(NUM_REQUESTS):
        own = rng.integers(0, VOCABULARY, int(rng.integers(1, 130 - num_shared)))
        prompt = np.concatenate([opening[: num_shared * (number % 2)], own]).astype(np.int32)
        prompt[-1] = prompt[len(prompt) // 2]  # something to guess by
        if number == NUM_REQUESTS - 1:
            prompt = made[1].prompt
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        made.append(Request(str(number), prompt, params))
    return made


class Served:
    """What one schedule computed: the logits of every answered token, and what happened on the way."""

    def __init__(self, path: Path, overrides: list[str], asked: list[Request], seed: int | None) -> None:
        said = [f"model.path={path}", "device.batch_invariant=true", "cache.memory_gib=null", *overrides]
        built = build(load(ANY, said))
        engine, sampler = built.engine, built.runner.sampler
        start, rows = sampler.start, engine.slots
        rng = np.random.default_rng(seed)
        found: dict[tuple[str, int], torch.Tensor] = {}

        def started(logits: torch.Tensor, owners: Any, targets: Any, *others: Any) -> Any:
            for each, owner, target in zip(logits, owners.tolist(), targets.tolist()):
                found[rows.requests[owner].id, target] = each.clone()  # a wrong draft's is replaced later
            return start(logits, owners, targets, *others)

        sampler.start = started  # watched from outside
        waiting = list(asked) if seed is None else [asked[each] for each in rng.permutation(len(asked))]
        while waiting or engine.has_work:
            if seed is not None:
                torch.set_num_threads(int(rng.integers(1, 4)))
            while waiting and (seed is None or rng.random() < 0.5):
                engine.add(waiting.pop())
            if engine.has_work:
                engine.step()
        self.counters = engine.scheduler.counters
        self.answers = {each.id: each.answer.tolist() for each in asked}
        self.logits = {
            (each.id, at): found[each.id, at]
            for each in asked
            for at in range(len(each.tokens) - NUM_NEW, len(each.tokens))
        }


def schedule(seed: int, case: Case) -> list[str]:
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 7))
    drafts = [f"speculation.kind={case.drafts}", "speculation.adaptive=fixed"]
    return [
        f"scheduler.num_slots={slots}",
        f"scheduler.max_batch_tokens={int(rng.integers(slots + max(4, case.grid), 79 + case.grid))}",
        f"cache.num_pages={int(rng.integers(12, 24))}",
        f"cache.prefix_sharing={str(bool(rng.integers(2))).lower()}",
        *(drafts if seed % 2 else []),
    ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, IN_ONE_TEST))
def test_random_schedules_differ_in_no_bit(checkpoint: Callable[[str], Path], name: str, first: int) -> None:
    """Chunks, hits, preemptions, drafts and numbers of threads are drawn; alone is what they are held to.

    A token is computed in a prompt, as a decode, as a draft, and as a prompt again after a preemption.
    """
    case = CASES[name]
    path, model = checkpoint(case.checkpoint), case.overrides
    one_by_one = ["cache.num_pages=40", "cache.prefix_sharing=false", "scheduler.num_slots=1"]
    by_itself = Served(path, [*model, *one_by_one], case.requests(), None)
    assert not by_itself.counters.preemptions
    assert not by_itself.counters.hit_tokens
    alone, answers = by_itself.logits, by_itself.answers
    happened = np.zeros(3, np.int64)
    for seed in case.seeds(first):
        served = Served(path, [*model, *schedule(seed, case)], case.requests(), seed)
        assert served.answers == answers, seed
        assert all(torch.equal(served.logits[at], alone[at]) for at in alone), seed
        counters = served.counters
        happened += [counters.preemptions, counters.hit_tokens, counters.draft_tokens]
    assert (happened > 0).all(), "no request was preempted, none hit a prefix, or none had a draft"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    first_quick(
        1, [*((name, "bfloat16") for name in cases(IN_HALVES, PLAIN)), *((name, "float32") for name in PLAIN)]
    ),
)
def test_layers_in_one_call_have_the_bits_of_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """Heads are normed before rotary, after it and not at all; decodes stand before prompts and behind."""
    path = make(next(each for each in VARIANTS if each.name == name), tmp_path)[1]
    said = [f"model.dtype={dtype}", "device.batch_invariant=false", "cache.num_pages=40"]
    said += ["scheduler.num_slots=4", "scheduler.max_batch_tokens=50"]
    join, joined = CpuOps.join_layers, []

    def watched(*given: Any) -> Any:
        joined.append(join(*given))
        return joined[-1]

    monkeypatch.setattr("models.ops.cpu.ops.is_onednn_ahead", lambda own, dtype: False)  # It is measured
    monkeypatch.setattr(CpuOps, "join_layers", watched)
    in_one = Served(path, said, requests(), 1)
    own = products()
    assert isinstance(own, Products), own
    is_read = dtype == "float32" or own.multiplies(torch.empty(2, 2, dtype=torch.bfloat16))
    assert [each is not None for each in joined] == [is_read]
    monkeypatch.setattr(CpuOps, "join_layers", lambda *given: None)
    one_by_one = Served(path, said, requests(), 1)
    assert in_one.answers == one_by_one.answers
    assert all(torch.equal(logits, one_by_one.logits[at]) for at, logits in in_one.logits.items())


def test_what_is_not_promised_is_refused_by_name(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a compiler, quantized weights, states that are rounded, and no compiler asked for."""

    def refused(*overrides: str) -> str:
        tiny = f"model.path={ROOT / 'recipes/tiny/weights'}"
        with pytest.raises(RecipeError) as error:
            build(load(ANY, [tiny, "device.batch_invariant=true", *overrides]))
        return str(error.value)

    states = f"model.path={checkpoint('qwen3_next')}", "scheduler.num_slots=4"
    assert "states that are rounded where a step ends" in refused(*states, "cache.state_dtype=bfloat16")
    assert "device.compile is false" in refused(*states, "device.compile=false")
    assert "promised for quantized weights" in refused("model.quantization=w8a8")
    assert "device.compile is false" in refused("device.compile=false")
    monkeypatch.setattr(machine, "products", lambda: "there is no C++ compiler g++")
    assert "there is no C++ compiler g++; install g++" in refused()
    assert "there is no C++ compiler g++; install g++" in refused(*states)
    monkeypatch.setattr(machine, "products", lambda: "products.cpp cannot be compiled: a.h:1: error: no")
    assert "a.h:1: error: no; set device.batch_invariant to false" in refused()
