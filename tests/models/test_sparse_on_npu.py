"""Decoders with sparse attention give transformers' tokens by an NPU's operators, eager and captured.

The checkpoints have the widths that the operators take, and read fewer tokens than the prompts have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams
from recipes import machine as machines
from recipes.assembly.engine import build
from recipes.machine import Npu
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import section, settings, stand_in_alone
from tests.models.families import followed, make
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.test_latent_prolog import PROLOG, SMALLEST, say_that_it_gains
from tests.models.variants import PUBLISHED_LATENT

pytestmark = [pytest.mark.npu, stand_in_alone]

OF_GLM = {"qk_nope_head_dim": 192, "v_head_dim": 256}
WIDTHS: dict[str, dict[str, Any]] = {"v32": {}, "glm_5_shared": OF_GLM}
NUM_NEW = 6
INDEXER, ATTENTION = "npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention"


@pytest.fixture(scope="module", params=WIDTHS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    variant = next(each for each in SPARSE_VARIANTS if each.name == request.param)
    options = variant.options | PUBLISHED_LATENT | {"index_head_dim": 128} | WIDTHS[request.param]
    made = replace(variant, name=f"{variant.name}_on_npu", options=options, saved_as=torch.float32)
    return make(made, tmp_path_factory.mktemp("sparse"))


def joined(folder: Path) -> tuple[Any, Path]:
    """The smallest checkpoint whose queries, latents and compressed queries one launch computes."""
    variant = next(each for each in SPARSE_VARIANTS if each.name == "v32")
    options = variant.options | PUBLISHED_LATENT | SMALLEST | {"index_head_dim": 128}
    return make(replace(variant, name="v32_joined", options=options), folder)


@pytest.mark.slow
def test_an_indexer_reads_the_queries_of_one_launch_before_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_that_it_gains(tmp_path, monkeypatch)
    names = serve_as_transformers(joined(tmp_path / "model"), 4)
    assert names.count(PROLOG) == names.count(INDEXER) > 0


@pytest.mark.parametrize("graphs", [0, 4])
def test_tokens_are_those_of_transformers(graphs: int, checkpoint: tuple[Any, Path]) -> None:
    """Prompts of more and of fewer tokens than are read, in chunks, and the captured steps of decodes."""
    names = serve_as_transformers(checkpoint, graphs)
    assert 0 < names.count(INDEXER) <= names.count(ATTENTION)


def serve_as_transformers(checkpoint: tuple[Any, Path], graphs: int) -> list[str]:
    """Answer some prompts as transformers does, and return what was launched for it."""
    model, path = checkpoint
    random = np.random.default_rng(6)
    prompts = [random.integers(0, 160, length).tolist() for length in (30, 70, 7, 90)]
    keys = [f"model.path={path}", *settings("npu"), f"device.graphs={graphs}", "cache.memory_gib=null"]
    keys += ["device.attention=fused", "model.dtype=float32", "cache.num_pages=40", "scheduler.num_slots=4"]
    keys += ["scheduler.max_batch_tokens=48", "cache.page_size=16", "scheduler.max_request_tokens=128"]
    engine = build(load(ROOT / "recipes/any/cpu.yaml", keys)).engine
    machine = machines.start(section("npu"))
    assert isinstance(machine, Npu)
    assert machine.launch_log is not None
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    requests = [Request(str(at), np.array(prompt), params) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    with machine.launch_log.reading() as asked:
        while engine.has_work:
            engine.step()
    answers = [each.answer.tolist() for each in requests]
    assert answers == [followed(model, *each, NUM_NEW)[0] for each in zip(prompts, answers)]
    captured = {each.name for each in asked if each.in_graph}
    assert captured >= ({INDEXER, ATTENTION} if graphs else set())
    assert "update" not in {each.kind for each in asked}
    return [each.name for each in asked]
