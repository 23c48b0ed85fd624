"""Engines of two ranks give the tokens that transformers gives each request alone.

Two ranks divide each layer or, of mixtures, hold whole experts each; or divide each page of the cache; or the
heads of states, or half of the layers. Prompts are chunked, beginnings shared, and the pool is so small that
requests are preempted, in float32. The same two processes serve all engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_cache.states import GRID
from models.parallel.group import ALONE
from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.families import VARIANTS, Variant, followed, make
from tests.models.families import VOCABULARY as STATE_VOCABULARY
from tests.models.mtp_layers import target_of
from tests.models.rank_engines import Asked, Served, serve_all
from tests.models.recurrent_variants import RECURRENT_VARIANTS

# A test waits for the two processes that serve all engines of its module
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("forked_ranks")]

VOCABULARY = 157  # which two ranks cannot share evenly
# Of mixtures, the ranks also divide the rows of steps of five tokens and more
EXPERTS = "parallel.expert=2", "parallel.least_divided_tokens=5"
CPU = ("device.compile=false", "device.threads=1")
NPU = ("device.kind=npu", "device.virtual=true", "device.virtual_fp32=true", "device.compile=false")
REFERENCE = "device.attention=reference"
GUESSES = ("speculation.kind=mtp", "speculation.max_tokens=3")


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many prompts of at most `longest` tokens, every other of which opens like a few others, are each
    answered by `num_new` tokens, in little room.
    """

    num_prompts: int
    longest: int
    opening: int
    num_new: int
    page_size: int
    num_pages: int
    num_slots: int
    batch_tokens: int

    def prompts(self) -> list[list[int]]:
        random = np.random.default_rng(0)
        openings = random.integers(0, VOCABULARY, (self.num_prompts // 8, self.opening)).tolist()
        lengths = [1, self.longest, *random.integers(2, self.longest + 1, self.num_prompts - 2).tolist()]
        prompts = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
        for index in range(1, self.num_prompts, 2):
            length = lengths[index]
            prompts[index] = (openings[index // 2 % len(openings)][: length - 1] + prompts[index])[:length]
        return prompts

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            "model.dtype=float32",
            f"cache.page_size={self.page_size}",
            f"cache.num_pages={self.num_pages}",
            "cache.memory_gib=null",
            f"scheduler.num_slots={self.num_slots}",
            f"scheduler.max_batch_tokens={self.batch_tokens}",
            f"scheduler.max_request_tokens={self.longest + self.num_new}",
        )


FEW = Crowd(8, 20, 10, 6, page_size=2, num_pages=21, num_slots=4, batch_tokens=8)
LONGER = Crowd(8, 40, 20, 16, page_size=4, num_pages=22, num_slots=4, batch_tokens=24)
# What ranks divide otherwise; test_tensor_parallel.py has the logits of one of each family
DIVIDED = {"llama_biased": (), "mixtral_window": EXPERTS, "gpt_oss_half": EXPERTS, "deepseek_v3": EXPERTS}


def variant_of(name: str, **options: Any) -> Variant:
    (variant,) = (each for each in VARIANTS if each.name == name)
    return replace(variant, options=variant.options | {"vocab_size": VOCABULARY} | options)


@dataclass(frozen=True, slots=True)
class Asking:
    """An engine: its checkpoint, how its recipe differs, and the prompts that it answers."""

    checkpoint: Callable[[Path], tuple[Any, Path]]
    settings: tuple[str, ...]
    prompts: list[list[int]]
    num_new: int
    near: float = 1e-4  # log-probabilities of transformers


def of_crowd(crowd: Crowd, name: str, *more: str, **options: Any) -> Asking:
    """An engine that a crowd asks."""
    checkpoint = partial(make, variant_of(name, **options))
    return Asking(checkpoint, (*crowd.settings, *more), crowd.prompts(), crowd.num_new)


def with_states(name: str, *more: str) -> Asking:
    """An engine of a model whose layers keep states; prompts go on from states of others, and are swapped."""
    random = np.random.default_rng(5)
    opening = random.integers(0, STATE_VOCABULARY, 2 * GRID).tolist()
    tails = [random.integers(0, STATE_VOCABULARY, count).tolist() for count in (9, 30, 1, 60, 100, 2)]
    settings = (
        *("model.dtype=float32", "cache.page_size=16", "cache.num_pages=17", "cache.memory_gib=null"),
        *("cache.host_gib=0.01", "scheduler.num_slots=4", "scheduler.max_request_tokens=220"),
        f"scheduler.max_batch_tokens={GRID + 4}",
    )
    prompts = [opening + tail for tail in tails[:4]] + [*tails[4:], opening + tails[0]]
    (variant,) = (each for each in RECURRENT_VARIANTS if each.name == name)
    return Asking(partial(make, variant), (*settings, *more), prompts, 16, near=1e-3)


def with_guesses(crowd: Crowd, *more: str) -> Asking:
    """An engine whose checkpoint has a layer that predicts further tokens."""
    settings = (*crowd.settings, *GUESSES, *more)
    return Asking(partial(target_of, "glm4_moe_lite"), settings, crowd.prompts(), crowd.num_new)


PAGES_2 = "parallel.context=2"
INT8 = REFERENCE, "cache.dtype=int8"
Cell = tuple[str, str]  # what is served, and how two ranks divide it
SERVED: dict[Cell, Asking] = {
    **{(name, "EP 2" if way else "TP 2"): of_crowd(FEW, name, *way) for name, way in DIVIDED.items()},
    ("latents", "pages"): of_crowd(LONGER, "deepseek_v3", PAGES_2),
    ("one head", "pages"): of_crowd(LONGER, "qwen2_yarn", PAGES_2, REFERENCE, num_key_value_heads=1),
    ("guesses", "pages"): with_guesses(LONGER, PAGES_2),
    ("guesses", "PP 2"): with_guesses(LONGER, "parallel.pipeline=2"),
    ("qwen3_next", "states, EP 2"): with_states("qwen3_next", "parallel.expert=2"),
    ("kimi_linear", "states, TP 2"): with_states("kimi_linear", "parallel.least_divided_tokens=8"),
    ("qwen3_5", "states, PP 2"): with_states("qwen3_5", "parallel.pipeline=2"),
}
IN_INT8: Cell = "int8", "pages"
# What is not held to transformers, which has no such pages, but to one rank
AS_ONE = {IN_INT8: of_crowd(LONGER, "qwen2_yarn", PAGES_2, *INT8, num_key_value_heads=1)}


@dataclass(frozen=True, slots=True)
class Found:
    """The model that transformers makes of each checkpoint, and what each rank said."""

    models: dict[Cell, Any]
    ranks: dict[Cell, list[Served]]


def found_by(asking: dict[Cell, Asking], folder: Path, *device: str) -> Found:
    """Two processes serve all of these, one engine after the other."""
    models, asked = {}, []
    for number, (cell, each) in enumerate(asking.items()):
        models[cell], path = each.checkpoint(folder / str(number))
        settings = (f"model.path={path}", *each.settings, *device)
        asked.append(Asked(" ".join(cell), settings, each.prompts, each.num_new))
    world = load(ROOT / "recipes/any/cpu.yaml", [*device, f"model.path={folder}", "parallel.tensor=2"])
    ranks = in_ranks(world, serve_all, asked, folder)
    return Found(models, {cell: [rank[" ".join(cell)] for rank in ranks] for cell in asking})


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(SERVED | AS_ONE, tmp_path_factory.mktemp("cpus"), *CPU)


@pytest.mark.parametrize("cell", SERVED, ids=" ".join)
def test_two_ranks_answer_as_transformers_does(cell: Cell, on_cpus: Found) -> None:
    check(on_cpus, cell, SERVED[cell])


def test_pages_in_int8_that_two_ranks_divide_give_the_tokens_of_one(on_cpus: Found, tmp_path: Path) -> None:
    asking = AS_ONE[IN_INT8]
    settings = (f"model.path={asking.checkpoint(tmp_path)[1]}", *asking.settings, *CPU)
    asked = Asked("one", tuple(each for each in settings if each != PAGES_2), asking.prompts, asking.num_new)
    recipe = load(ROOT / "recipes/any/cpu.yaml", asked.settings)
    (one,) = serve_all(recipe, ALONE, [asked], tmp_path).values()
    leader, follower = on_cpus.ranks[IN_INT8]
    assert leader.answers == one.answers
    torch.testing.assert_close(torch.tensor(leader.logprobs), torch.tensor(one.logprobs), rtol=0, atol=1e-2)
    assert leader.logits == follower.logits, "ranks have the same logits, to the bit"
    assert leader.happened["preemptions"] >= 1, "the pool was too large to force preemptions"
    assert leader.happened["hit_tokens"] > 0, "no prefix was shared"
    assert leader.happened["chunks"] > 0, "no prompt was cut"


def check(found: Found, cell: Cell, asking: Asking) -> None:
    leader, follower = found.ranks[cell]
    print(cell, leader.happened)
    prompts = zip(asking.prompts, leader.answers, strict=True)
    told = [followed(found.models[cell], *each, asking.num_new) for each in prompts]
    assert leader.answers == [tokens for tokens, _ in told]
    ours = torch.tensor(leader.logprobs)  # [prompts, num_new, 1 + NUM_TOP, 2]
    theirs = torch.stack([logprobs for _, logprobs in told]).gather(2, ours[..., 0].long())
    torch.testing.assert_close(ours[..., 1], theirs, rtol=0, atol=asking.near)
    if "PP 2" not in cell[1]:  # the second rank alone has logits
        assert leader.logits == follower.logits, "ranks have the same logits, to the bit"
        assert len(leader.logits) >= asking.num_new or cell[0] == "guesses"
    assert leader.happened["preemptions"] >= 1, "the pool was too large to force preemptions"
    assert leader.happened["hit_tokens"] > 0, "no prefix was shared"
    assert leader.happened["accepted_tokens"] > 0 or cell[0] != "guesses", "no guess was right"
    assert leader.happened["chunks"] > 0 or cell[0] == "guesses", "no prompt was cut"
    assert follower.happened.items() <= leader.happened.items()
