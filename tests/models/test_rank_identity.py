"""Engines of two ranks give the tokens that transformers gives each request alone.

Two ranks divide each layer or, of mixtures, hold whole experts each. Prompts are chunked, beginnings shared,
and the pool is so small that requests are preempted, in float32. With THOROUGH=1 all checkpoints are served
instead of seven, and one of each family on virtual NPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, Variant, generated, make, wide
from tests.models.latent_variants import LATENT_VARIANTS
from tests.models.rank_engines import Asked, Served, serve_all
from tests.thorough import THOROUGH, cases

# A test waits for the two processes that serve all engines of its module
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VOCABULARY = 157  # which two ranks cannot share evenly
ALL = {each.name: each for each in [*VARIANTS, *LATENT_VARIANTS]}
ONE_A_FAMILY = (
    *("llama_biased", "mistral_window", "qwen2_yarn", "qwen3_layer_types", "glm4", "phi3_part", "gemma2"),
    *("gemma3_layer_types", "internlm3_biased", "mixtral_window", "gpt_oss_half", "qwen3_moe", "qwen2_moe"),
    *("glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "seed_oss_biased", "hy_v3", "ernie4_5_moe"),
    *("minimax_m2", "hunyuan_moe", "ministral3", "olmo3_types", "ernie4_5_biased", "hunyuan_alpha"),
)
EVEN = {  # experts that two ranks can share
    "qwen3_moe_window": {"num_experts": 6},
    "qwen2_moe_sparse": {"num_experts": 6},
    "mixtral_one": {"num_local_experts": 4},
    "deepseek_v2_greedy": {"n_routed_experts": 8},
    "deepseek_v3_one_group": {"n_routed_experts": 6},
    "gpt_oss": {"num_local_experts": 4},
    "hy_v3_types": {"num_experts": 6},
    "ernie4_5_moe_interval": {"moe_num_experts": 6},
    "minimax_m2_tied": {"num_local_experts": 6},
    "hunyuan_moe_one": {"num_experts": 6},
}
# Of mixtures, the ranks also divide the rows of steps of five tokens and more
EXPERTS = "parallel.expert=2", "parallel.least_divided_tokens=5"
WAYS: dict[str, tuple[str, ...]] = {"TP 2": (), "EP 2": EXPERTS}
CPU = ("device.compile=false", "device.threads=1")
NPU = ("device.kind=npu", "device.virtual=true", "device.virtual_fp32=true", "device.compile=false")
PLAIN = ("gemma2",)  # whose capped scores no fused attention of an NPU takes, nor any graph


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
MANY = Crowd(32, 300, 200, 48, page_size=16, num_pages=70, num_slots=12, batch_tokens=96)
ON_NPUS = Crowd(16, 150, 70, 16, page_size=16, num_pages=26, num_slots=8, batch_tokens=32)
ON_CPUS = cases(FEW, MANY)
# What ranks divide otherwise; test_tensor_parallel.py has the logits of one of each family
DIVIDED = (
    *("llama_biased", "mistral_window", "qwen2_yarn", "gemma2", "mixtral_window", "gpt_oss_half"),
    *("deepseek_v3", "minimax_m2", "olmo3_full", "hy_v3"),
)
NAMES = cases(DIVIDED, tuple(ALL))


def ways_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each checkpoint with the ways to spread it; mixtures in both where time does not matter."""
    mixtures = {each.name for each in ALL.values() if any("expert" in option for option in each.options)}
    of_mixtures = cases(("EP 2",), tuple(WAYS))
    return [(name, way) for name in names for way in (of_mixtures if name in mixtures else ("TP 2",))]


@dataclass(frozen=True, slots=True)
class Found:
    """By checkpoint and way, what each rank said; by checkpoint, what transformers says of each prompt."""

    ranks: dict[tuple[str, str], list[Served]]
    expected: dict[str, list[tuple[list[int], torch.Tensor]]]


def found_by(crowd: Crowd, names: tuple[str, ...], folder: Path, *, on_npus: bool) -> Found:
    """Two processes serve these checkpoints in all ways, one engine after the other."""
    asked, expected, prompts = {}, {}, crowd.prompts()
    device = NPU if on_npus else CPU
    for name in names:
        model, path = make(variant_of(name, on_npus=on_npus), folder)
        expected[name] = [generated(model, prompt, crowd.num_new) for prompt in prompts]
        settings = [f"model.path={path}", *crowd.settings, *device]
        if on_npus:
            plain, captured = "device.attention=reference", f"device.graphs={crowd.num_slots}"
            settings.append(plain if name in PLAIN else captured)
        for _, way in ways_of([name]):
            asked[name, way] = Asked(f"{name} {way}", (*settings, *WAYS[way]), prompts, crowd.num_new)
    world = load(ROOT / "recipes/any/cpu.yaml", [*device, f"model.path={folder}", "parallel.tensor=2"])
    ranks = in_ranks(world, serve_all, [*asked.values()], folder)
    return Found({cell: [rank[each.name] for rank in ranks] for cell, each in asked.items()}, expected)


def variant_of(name: str, *, on_npus: bool) -> Variant:
    variant = replace(ALL[name], options=ALL[name].options | EVEN.get(name, {}))
    variant = wide(variant) if on_npus else variant
    return replace(variant, options=variant.options | {"vocab_size": VOCABULARY})


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(ON_CPUS, NAMES, tmp_path_factory.mktemp("cpus"), on_npus=False)


@pytest.fixture(scope="module")
def on_npus(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(ON_NPUS, ONE_A_FAMILY, tmp_path_factory.mktemp("npus"), on_npus=True)


def test_there_is_one_of_each_family() -> None:
    assert {ALL[name].family for name in ONE_A_FAMILY} == {each.family for each in ALL.values()}


@pytest.mark.parametrize(("name", "way"), ways_of(NAMES))
def test_two_ranks_answer_as_transformers_does(name: str, way: str, on_cpus: Found) -> None:
    check(on_cpus, name, way, ON_CPUS)


@pytest.mark.npu
@stand_in_alone
@pytest.mark.skipif(not THOROUGH, reason="THOROUGH=1 asks for it")
@pytest.mark.parametrize(("name", "way"), ways_of(ONE_A_FAMILY))
def test_so_two_virtual_npus_do(name: str, way: str, on_npus: Found) -> None:
    check(on_npus, name, way, ON_NPUS)
    for rank in on_npus.ranks[name, way]:
        assert (rank.happened["replays"] > 0) == (name not in PLAIN)


def check(found: Found, name: str, way: str, crowd: Crowd) -> None:
    leader, follower = found.ranks[name, way]
    print(name, way, leader.happened)
    tokens, logprobs = zip(*found.expected[name])
    assert leader.answers == list(tokens)
    ours = torch.tensor(leader.logprobs)  # [prompts, num_new, 1 + NUM_TOP, 2]
    theirs = torch.stack(logprobs).gather(2, ours[..., 0].long())
    torch.testing.assert_close(ours[..., 1], theirs, rtol=0, atol=1e-4)
    assert leader.logits == follower.logits, "ranks have the same logits, to the bit"
    assert len(leader.logits) >= crowd.num_new
    assert leader.happened["preemptions"] >= 2, "the pool was too large to force preemptions"
    assert leader.happened["hit_tokens"] > 0, "no prefix was shared"
    assert leader.happened["chunks"] > crowd.num_prompts, "hardly a prompt was cut"
    assert follower.happened.items() <= leader.happened.items()
