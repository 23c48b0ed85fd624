"""Splitting the product of queries, keys and values in one launch changes no token, whichever launch it is.

By itself it is a copy of all parts at once; where a probe has found it right, it norms and rotates heads,
too. transformers is the judge of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from devices.ascend_limits import answers_file, product, write_answers
from models.step.runner import ModelRunner
from recipes import machine as machines
from recipes.assembly.engine import build
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import section, settings, stand_in_alone
from tests.models.families import VARIANTS, followed, make, wide
from tests.thorough import cases, first_quick

pytestmark = [pytest.mark.npu, stand_in_alone]

JOINED, SPLIT = "npu::npu_qkv_rms_norm_rope_cache", "aten::split_with_sizes_copy.out"
PROMPTS = [np.random.default_rng(seed).integers(0, 160, length).tolist() for seed, length in
           enumerate((30, 70, 21, 90))]  # fmt: skip
NEW = 6


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Npu:
    """The stand-in, whose answers come from an empty folder."""
    monkeypatch.setattr(machines, "ANSWERS", tmp_path)
    found = start(section("npu"))
    assert isinstance(found, Npu)
    return found


def answer(machine: Npu, folder: Path, *, joins: bool) -> None:
    """Write the probe's answer where machines read it."""
    path = answers_file(folder, machine.product.name, machine.cann, virtual=True)
    write_answers(path, {"joins_heads": joins})


@pytest.fixture
def joining(machine: Npu, tmp_path: Path) -> None:
    """As if verify_npu.sh had found that it is right and gains."""
    answer(machine, tmp_path, joins=True)


HEADS = ["qwen3_layer_types", "qwen3_moe"]


@pytest.fixture(scope="module", params=HEADS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model whose heads have norms and the one size that the operator takes."""
    variant = wide(next(each for each in VARIANTS if each.name == request.param), 128)
    return make(replace(variant, name=f"{variant.name}_{request.param}"), tmp_path_factory.mktemp("heads"))


def engine_of(path: Path, graphs: int, *more: str) -> Engine:
    keys = [f"model.path={path}", *settings("npu"), f"device.graphs={graphs}", "cache.memory_gib=null"]
    keys += ["cache.num_pages=40", "scheduler.num_slots=4", "scheduler.max_batch_tokens=48", *more]
    return build(load(ROOT / "recipes/any/cpu.yaml", keys)).engine


def steps_of(
    engine: Engine, log: Any, prompts: list[list[int]] = PROMPTS, num_new: int = NEW
) -> tuple[list[list[int]], list[Counter[str]]]:
    """The answers, and what each step asked for, by name."""
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    requests = [Request(str(at), np.array(prompt), params) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_work:
        with log.reading() as asked:
            engine.step()
        steps.append(Counter(each.name for each in asked))
    return [each.answer.tolist() for each in requests], steps


def serve(engine: Engine, log: Any) -> tuple[list[list[int]], dict[str, set[int]]]:
    """The answers, and how often a step called each of the two operators."""
    answers, steps = steps_of(engine, log)
    return answers, {name: {step[name] for step in steps} for name in (JOINED, SPLIT)}


def layers_of(engine: Engine) -> list[Any]:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return list(runner.decoder.layers)


def tables(engine: Engine) -> Iterator[torch.Tensor]:
    """What the operator is given as a cache."""
    for layer in layers_of(engine):
        yield layer.attention.joins._cache


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("graphs", first_quick(1, [4, 0]))
def test_tokens_of_joined_heads_are_those_of_transformers(
    graphs: int, checkpoint: tuple[Any, Path], machine: Npu
) -> None:
    model, path = checkpoint
    engine = engine_of(path, graphs)
    answers, calls = serve(engine, machine.launch_log)
    assert answers == [followed(model, *each, NEW)[0] for each in zip(PROMPTS, answers)]
    assert calls == {JOINED: {len(layers_of(engine))}, SPLIT: {0}}
    assert not any(each.any() for each in tables(engine)), "no token is written there"
    assert len({each.data_ptr() for each in tables(engine)}) == 1, "all layers have one"


@pytest.mark.usefixtures("joining")
def test_steps_that_are_too_long_are_normed_and_rotated_one_by_one(
    checkpoint: tuple[Any, Path], machine: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.ops.npu.joined_heads.MOST_TOKENS", 32)
    model, path = checkpoint
    engine = engine_of(path, 0)
    answers, calls = serve(engine, machine.launch_log)
    assert answers == [followed(model, *each, NEW)[0] for each in zip(PROMPTS, answers)]
    num_layers = len(layers_of(engine))
    assert calls == {JOINED: {0, num_layers}, SPLIT: {0, num_layers}}


@pytest.mark.parametrize("checkpoint", cases(HEADS[:1], HEADS), indirect=True)
@pytest.mark.parametrize("joins", first_quick(1, [True, False]))
def test_one_product_in_int8_is_taken_by_either(
    joins: bool, checkpoint: tuple[Any, Path], machine: Npu, tmp_path: Path
) -> None:
    """At once and in graphs alike."""
    answer(machine, tmp_path, joins=joins)
    found = []
    keys = "model.quantization=w8a8", "model.dtype=bfloat16", "device.virtual_fp32=false"
    for graphs in (0, 4):
        engine = engine_of(checkpoint[1], graphs, *keys)
        answers, calls = serve(engine, machine.launch_log)
        found.append(answers)
        num_layers = len(layers_of(engine))
        # A step of one row has nothing to split
        wanted = {JOINED: {num_layers}, SPLIT: {0}} if joins else {JOINED: {0}, SPLIT: {0, num_layers}}
        assert calls == wanted
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_product_in_int8_has_the_bits_of_one_for_each(dtype: torch.dtype, machine: Npu) -> None:
    from models.ops.npu.ops import NpuOps

    generator, ops, widths = torch.Generator().manual_seed(3), NpuOps(machine.product), (256, 64, 64)
    weight = torch.randint(-127, 128, (384, 96), generator=generator).to(torch.int8).to(machine.device)
    scale, bias = (torch.rand(384, generator=generator).to(machine.device) for _ in range(2))
    x = torch.randn(5, 96, generator=generator).to(dtype).to(machine.device)
    for biased in (None, bias):
        whole, parts = (
            ops.linear_int8_split(x, ops.pack_int8_split(weight, scale, biased, widths, in_parts), widths)
            for in_parts in (False, True)
        )
        assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_parts_lie_one_after_another_and_those_of_one_row_as_they_are(machine: Npu) -> None:
    from models.ops.npu.ops import NpuOps

    y, widths = torch.arange(36.0, device=machine.device).view(3, 12), (6, 4, 2)
    log = machine.launch_log
    assert log is not None
    for ops, rows, launches in (
        (NpuOps(machine.product), 3, 1),
        (NpuOps(machine.product), 1, 0),
        (NpuOps(product("310P", "")), 3, 0),
    ):
        with log.reading() as asked:
            parts = ops.split(y[:rows], widths)
        assert [each.name for each in asked] == [SPLIT] * launches
        assert all(each.is_contiguous() for each in parts) == (launches == 1 or rows == 1)
        for part, want in zip(parts, y[:rows].cpu().split(widths, 1), strict=True):
            assert torch.equal(part.cpu(), want)


def test_nothing_is_joined_before_the_probe_has_found_it_right(
    checkpoint: tuple[Any, Path], machine: Npu
) -> None:
    assert all(layer.attention.joins is None for layer in layers_of(engine_of(checkpoint[1], 0)))


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize(("name", "head_dim"), [("qwen3", 64), ("llama", 128), ("minimax_m2", 128)])
def test_heads_that_the_operator_does_not_take_are_normed_as_before(
    name: str, head_dim: int, tmp_path: Path
) -> None:
    """Heads of 64, heads without norms, and norms of all heads together."""
    variant = wide(next(each for each in VARIANTS if each.name == name), head_dim)
    engine = engine_of(make(variant, tmp_path)[1], 0)
    assert all(layer.attention.joins is None for layer in layers_of(engine))
