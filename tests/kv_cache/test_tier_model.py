"""The tokens of a real model are the same with a tier of pages and without, also after a restart."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from devices.cpp_sources import missing_for_sources
from kv_cache.device.page_bytes import PageBytes
from kv_cache.tier.disk import DiskStore
from kv_cache.tier.page_tier import PageTier
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.assembly.page_tier import digests
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.kv_cache import device
from tests.patience import PATIENCE_S
from tests.thorough import cases

COUNT = 40


def attach(engine: Engine, folder: Path) -> PageTier:
    """Give an engine over the small model a tier in a folder."""
    runner = engine.runner
    if isinstance(runner, device.PoisonedRunner):
        runner = runner.inner
    assert isinstance(runner, ModelRunner)
    identity = b"i" * 32
    store = DiskStore(folder, 10**8, identity)
    tier = PageTier(store, PageBytes(runner.cache), runner.cache.apply, identity, PATIENCE_S, "a folder")
    runner.cache.tier = engine.tier = tier
    return tier


@pytest.mark.slow
@pytest.mark.parametrize("attention", cases(["int8"], ["fused", "int8"]))
def test_requests_through_two_lives_of_an_engine_get_the_tokens_of_each_alone(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "int8":
        device.exact(monkeypatch)
    wanted = device.alone(attention, COUNT, 2)

    def meddle(engine: Engine, step: int) -> None:
        device.resize(engine, step)
        if not len(engine.slots.busy):
            time.sleep(0.002)  # waits for a lookup

    for life in range(2):
        engine = device.make(
            attention,
            num_pages=24,
            num_host_pages=40,
            compact_every_steps=1,
            poisoned=True,
            has_tier=True,
        )
        tier = attach(engine, tmp_path)
        made = device.requests(COUNT, 2)
        device.serve(engine, made, at_once=2, meddle=meddle)
        assert tier.settle(PATIENCE_S)
        assert [tuple(each.answer.tolist()) for each in made] == [*wanted]
        counters, found = engine.scheduler.counters, tier.counters
        print(life, counters, found)
        assert counters.preemptions > 0
        assert counters.compacted_pages > 0
        assert not found.refused + found.dropped + found.late
        engine.close()
    assert counters.fetched_pages > 20
    assert found.hits > 5


LATENT = (
    "{model_type: deepseek_v2, vocab_size: 128, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 4, q_lora_rank: null, kv_lora_rank: 16,"
    " qk_rope_head_dim: 8, qk_nope_head_dim: 16, v_head_dim: 16, n_routed_experts: 4, num_experts_per_tok: 2,"
    " moe_intermediate_size: 16, first_k_dense_replace: 1, max_position_embeddings: 256,"
    " rms_norm_eps: 1.0e-5, eos_token_id: 0}"
)


def served(folder: Path, *overrides: str) -> tuple[list[list[int]], int, Engine]:
    """The answers of an engine to some prompts, how many tokens it found, and the engine, which has ended."""
    tier = f"cache.tier={{kind: disk, gib: 0.1, path: {folder}, wait_s: 60}}"
    given = [f"{key}={value}" for key, value in device.OVERRIDES.items()]
    recipe = load(ROOT / "recipes/any/cpu.yaml", [*given, "cache.host_gib=0.01", tier, *overrides])
    built = build(recipe)
    random = np.random.default_rng(3)
    prompts = [random.integers(1, device.VOCABULARY, 60) for _ in range(4)]
    made = [Request(str(at), each, SamplingParams(max_tokens=8)) for at, each in enumerate(prompts)]
    for each in made:
        built.engine.add(each)
    while built.engine.has_work:
        if built.engine.step() is None:
            time.sleep(0.001)
    tier = built.runner.cache.tier
    assert tier is not None
    assert tier.settle(PATIENCE_S)
    built.engine.close()
    return [each.answer.tolist() for each in made], sum(each.num_cached_tokens for each in made), built.engine


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages that one engine has left."""
    folder = tmp_path_factory.mktemp("left")
    served(folder)
    return folder


FOUND = 4 * (59 // device.PAGE_SIZE) * device.PAGE_SIZE


@pytest.mark.parametrize("model", [(), (f"model.config={LATENT}",)], ids=["llama", "latents"])
def test_a_restart_finds_all_pages_and_gives_the_same_tokens(tmp_path: Path, model: tuple[str, ...]) -> None:
    cold, num_cold, _ = served(tmp_path, *model)
    warm, num_warm, engine = served(tmp_path, *model)
    assert (num_cold, num_warm) == (0, FOUND)
    assert warm == cold
    assert engine.scheduler.counters.host_hit_tokens == FOUND


@pytest.mark.parametrize(
    "change",
    [
        "model.seed=1",
        "model.dtype=bfloat16",
        "cache.page_size=16",
        "model.config.rope_theta=5000",
        "model.config.num_hidden_layers=1",
    ],
)
def test_pages_of_another_model_are_never_found(left: Path, change: str) -> None:
    _, found, _ = served(left, change)
    assert found == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", ["device.attention=reference", "cache.dtype=int8"])
def test_pages_in_another_form_are_never_found(tmp_path: Path, change: str) -> None:
    plain = "device.attention=reference"
    served(tmp_path, *([] if change == plain else [plain]))
    _, found, _ = served(tmp_path, plain, change)
    assert found == 0


@pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))
def test_pages_of_who_promises_no_bits_are_never_found_by_who_does(tmp_path: Path) -> None:
    heads = ("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "cache.page_size=16")
    served(tmp_path, *heads)
    promised = "device.batch_invariant=true", "device.compile=true"
    cold, found, _ = served(tmp_path, *heads, *promised)
    assert found == 0
    again, found, _ = served(tmp_path, *heads, *promised)
    assert (again, found) == (cold, 4 * 48)


def test_another_checkpoint_of_the_same_shape_is_another_model(tmp_path: Path) -> None:
    """A number of a weight is changed, and nothing else."""
    tensors = {"model.embed_tokens.weight": np.zeros((4, 4), dtype=np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    one = digests(tmp_path)
    assert one == digests(tmp_path)
    tensors["model.embed_tokens.weight"][3, 2] = 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    assert digests(tmp_path) != one
