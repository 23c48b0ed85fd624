"""Decoders with sparse attention answer as in transformers by an NPU's operators, and over ranks of them.

The checkpoints have the widths that the operators take, and read fewer tokens than the prompts have.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attention.sparse
from continuous_batching.request import Request, SamplingParams
from models.parallel.group import ALONE, Group
from recipes import machine as machines
from recipes.assembly.engine import build
from recipes.machine import Npu
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, section, settings, stand_in_alone
from tests.models.families import followed, make
from tests.models.modelslim_checkpoints import checkpoint as checkpoint_of
from tests.models.modelslim_checkpoints import quantised
from tests.models.mtp_layers import target_of
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.tensor_rank import built, logits_of
from tests.models.test_latent_prolog import PROLOG, SMALLEST, say_that_it_gains
from tests.models.test_modelslim import everywhere, expected, glm_5
from tests.models.test_random_shares import together
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


def test_tokens_are_those_of_transformers(checkpoint: tuple[Any, Path]) -> None:
    """Prompts of more and of fewer tokens than are read, in chunks, and the captured steps of decodes."""
    names = serve_as_transformers(checkpoint, 4)
    assert 0 < names.count(INDEXER) <= names.count(ATTENTION)


RANKED = {"num_hidden_layers": 3, "moe_intermediate_size": 32, **PUBLISHED_LATENT, "index_head_dim": 128}


def dividing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks divide the rows of steps of 16 or more; return the rows of those in which they did."""
    rows: list[int] = []
    to_rows = attention.sparse.RowPart.to_rows

    def counted(part: attention.sparse.RowPart, x: Tensor) -> Tensor:
        rows.append(part.num_tokens)
        return to_rows(part, x)

    monkeypatch.setattr("attention.sparse.DIVIDED_ROWS", 8)
    monkeypatch.setattr(attention.sparse.RowPart, "to_rows", counted)
    return rows


def calm(name: str, root: Path) -> tuple[Any, Path]:
    """A checkpoint in W8A8 whose layers add little, so that bfloat16 hardly changes what is chosen."""
    variant = next(each for each in SPARSE_VARIANTS if each.name == name)
    options = variant.options | RANKED | OF_GLM | {"max_position_embeddings": 512}
    model, path = make(replace(variant, options=options, shard_size="5GB", saved_as=torch.bfloat16), root)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if each.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight *= 0.1
    model.bfloat16().save_pretrained(path)
    return model.float(), quantised(model, path, glm_5, norm_biases=True)


@pytest.mark.slow
def test_w8a8_answers_by_its_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured, with a cache in int8, and over two ranks that divide the rows of prompts.

    Static products are in bfloat16 alone, so that answers are near, and far from those of all tokens read.
    """
    rows = dividing(monkeypatch)
    model, path = calm("glm_5_shared", tmp_path)
    right = expected(model, path)

    def distance(logits: Tensor) -> float:
        return float((logits.float().log_softmax(-1) - right).abs().mean())

    def logits(group: Group, graphs: bool = False, int8: bool = False) -> Tensor:
        decoder = built(path, group, "npu", way="fused", dtype="bfloat16", int8_cache=int8)[0]
        return logits_of(decoder, graphs=graphs)

    found = [logits(ALONE, graphs=True), logits(ALONE, graphs=True, int8=True), *together(2, logits)]
    assert rows
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"index_topk": 1024}))
    everything = distance(logits(ALONE))
    distances = [distance(each) for each in found]
    assert max(distances) < 0.5 * everything, (distances, everything)


@pytest.mark.slow
def test_int8_answers_as_its_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, captured, and over two ranks that divide the rows of prompts.

    A number that lies between two integers to the last bit may fall on either, as the order of a sum has it,
    which moves little of all answers; a cache in the model's type moves them more.
    """
    rows = dividing(monkeypatch)
    path = checkpoint_of("v32", tmp_path, everywhere("FLOAT"), **RANKED)[1]

    def logits(group: Group, kind: Kind = "npu", graphs: bool = False, int8: bool = True) -> Tensor:
        way: Way | None = "fused" if kind == "npu" else None
        decoder = built(path, group, kind, way=way, int8_cache=int8)[0]
        return logits_of(decoder, graphs=graphs).log_softmax(-1)

    right = logits(ALONE, "cpu")
    found = [logits(ALONE), logits(ALONE, graphs=True), *together(2, logits), logits(ALONE, int8=False)]
    *distances, of_own_type = (float((each - right).abs().mean()) for each in found)
    assert max(distances) < 0.3 * of_own_type, (distances, of_own_type)
    assert rows


@pytest.mark.slow
def test_a_layer_with_an_indexer_drafts_in_captured_steps(tmp_path: Path) -> None:
    made = target_of("glm_5_shared", tmp_path, is_wide=True, index_head_dim=128)
    serve_as_transformers(made, 8, "speculation.kind=mtp", "speculation.max_tokens=2")


def serve_as_transformers(checkpoint: tuple[Any, Path], graphs: int, *more: str) -> list[str]:
    """Answer some prompts as transformers does, and return what was launched for it."""
    model, path = checkpoint
    random = np.random.default_rng(6)
    prompts = [random.integers(0, 160, length).tolist() for length in (30, 70, 7, 90)]
    keys = [f"model.path={path}", *settings("npu"), f"device.graphs={graphs}", "cache.memory_gib=null"]
    keys += ["device.attention=fused", "model.dtype=float32", "cache.num_pages=40", "scheduler.num_slots=4"]
    keys += ["scheduler.max_batch_tokens=48", "cache.page_size=16", "scheduler.max_request_tokens=128"]
    engine = build(load(ROOT / "recipes/any/cpu.yaml", [*keys, *more])).engine
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
    assert (engine.scheduler.counters.accepted_tokens > 0) == bool(more)
    captured = {each.name for each in asked if each.in_graph}
    assert captured >= ({INDEXER, ATTENTION} if graphs else set())
    assert "update" not in {each.kind for each in asked}
    return [each.name for each in asked]
