"""Joining all that comes before latent attention in one launch changes no token and no layer's result.

At the smallest sizes that npu_mla_prolog_v3 takes, transformers is the judge; at DeepSeek-V3's sizes it is
the plain torch of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.latent import LatentAttention
from continuous_batching.batch import Batch
from devices.ascend_limits import answers_file, takes_prolog, write_answers
from kv_cache.device.storage import KVCache, LayerPages
from models.checkpoint import weights
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.latent import LatentSelfAttention
from models.ops.cpu.ops import CpuOps
from models.ops.reference import Ops
from models.parallel.group import ALONE
from models.parallel.share import Share
from models.quantization import Quantization
from models.step.runner import ModelRunner
from models.step_inputs import StepInputs
from recipes import machine as machines
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in, decoder_config
from recipes.machine import Npu, start
from tests.attention.planned import planned
from tests.device_kinds import section, stand_in_alone
from tests.models.families import VARIANTS, followed, make, wide
from tests.models.test_joined_heads import NEW, engine_of, steps_of
from tests.models.test_shared_weights import Rank
from tests.recipes.published import DEEPSEEK_V3, DEEPSEEK_V3_2
from tests.thorough import first_quick

pytestmark = [pytest.mark.npu, stand_in_alone]

PROLOG = "npu::npu_mla_prolog_v3"
SMALLEST = {"hidden_size": 1024, "q_lora_rank": 1536, "num_hidden_layers": 2, "rms_norm_eps": 1e-3}
PAGE, PAGES = 16, 12
SMALL = 2e-3  # hidden states, so that the eps of norms of what is made of them counts
NOTHING = np.empty(0, np.int64)
ROUNDED = {"plain": 0.012, "int8": 0.03}  # what bfloat16 makes of the operators apart, too


def say_that_it_gains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if verify_npu.sh had found that it is right and gains, and left that in a folder."""
    machine = start(section("npu"))
    assert isinstance(machine, Npu)
    path = answers_file(folder, machine.product.name, machine.cann, virtual=True)
    write_answers(path, {"joins_latents": True})
    monkeypatch.setattr(machines, "ANSWERS", folder)


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_that_it_gains(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """DeepSeek-V3 as it is published but for its hidden size, and what is beside attention."""
    variant = wide(next(each for each in VARIANTS if each.name == "deepseek_v3"))
    made = replace(variant, name="deepseek_v3_joined", options=variant.options | SMALLEST)
    return make(made, tmp_path_factory.mktemp("joined"))


@pytest.mark.usefixtures("joining")
def test_tokens_are_those_of_transformers(checkpoint: tuple[Any, Path]) -> None:
    """Prompts, longer than a step's budget too, then decodes alone, of which each layer asks for one."""
    model, path = checkpoint
    random = np.random.default_rng(6)
    prompts = [random.integers(0, 160, length).tolist() for length in (30, 70, 21, 90)]
    machine = start(section("npu"))
    assert isinstance(machine, Npu)
    answers, steps = steps_of(engine_of(path, 4), machine.launch_log, prompts)
    assert answers == [followed(model, *each, NEW)[0] for each in zip(prompts, answers)]
    assert {step[PROLOG] for step in steps} == {0, 2}, "a long span is expanded, and its queries not absorbed"
    assert steps[-1][PROLOG] == 2, "of each of the two layers"


def test_nothing_is_joined_before_the_probe_has_found_it_right(checkpoint: tuple[Any, Path]) -> None:
    runner = engine_of(checkpoint[1], 0).runner
    assert isinstance(runner, ModelRunner)
    assert not any(each.attention.joins for each in runner.decoder.layers)


def test_the_sizes_are_those_of_the_page() -> None:
    bfloat16, float32 = torch.bfloat16, torch.float32
    assert takes_prolog(bfloat16, 7168, 1536, 128)
    assert takes_prolog(float32, 7168, 1536, 128, takes_float32=True)
    for wrong in ((torch.float16, 7168, 1536), (float32, 7168, 1536), (bfloat16, 2560, 1536)):
        assert not takes_prolog(*wrong, 128)
    for rank in (None, 768):
        assert not takes_prolog(bfloat16, 7168, rank, 128)


@pytest.mark.parametrize("nope", [64, 128, 192])
def test_heads_of_another_width_are_not_joined(nope: int) -> None:
    """An indexer lets any width pass, which the operator refuses but for two."""
    own = start(section("npu", virtual_fp32=False))
    assert isinstance(own, Npu)
    own.product = replace(own.product, joins_latents=True)
    config = decoder_config(DEEPSEEK_V3_2 | {"qk_nope_head_dim": nope})
    attention = own.operators(shape_of(PAGE, config))[1]
    assert isinstance(attention, LatentAttention)
    assert attention.joins(config.hidden_size, 1536) == (nope != 64)


class Layer:
    """The attention of a layer with random weights, which are the same for a seed, over an empty cache."""

    def __init__(self, config: DecoderConfig, ops: Ops, attention: LatentAttention) -> None:
        self.config, self.attention = config, attention
        self.made = LatentSelfAttention(config, 0, "model.layers.0.", ops, attention, ALONE)
        generator = torch.Generator().manual_seed(3)
        for names, linear in self.made.joined():
            assert linear.weight is not None
            weight = torch.randn(linear.weight.shape, generator=generator) / linear.weight.shape[1] ** 0.5
            order = self.made.order(names[0])
            weight = weight if order is None else weight[order]
            if linear.weight.dtype == torch.int8:
                assert linear.weight_scale is not None
                linear.weight_scale.data.copy_(weight.abs().amax(-1, keepdim=True) / 127)
                weight = (weight / linear.weight_scale.data.cpu()).round()
            linear.weight.data.copy_(weight)
            linear.pack()
        for norm in self.made.norms().values():
            assert norm is not None
            norm.data.copy_(1 + torch.randn(norm.shape, generator=generator) / 4)
        self.made.pack()
        self.cache = KVCache([LayerPages(attention.new_planes)], PAGE, [PAGES])

    def step(self, spans: dict[int, tuple[int, int]], seed: int) -> Tensor:
        """[T, hidden] in float32, of spans (start, stop) of rows with three pages each."""
        starts, stops = (np.array(each, np.int64) for each in zip(*spans.values()))
        batch = Batch(np.array(list(spans), np.int64), starts, stops, NOTHING, NOTHING, NOTHING)
        table = 1 + np.arange(9, dtype=np.int32).reshape(3, 3)
        metadata = planned(self.attention, batch, table)
        positions = torch.cat([torch.arange(*span) for span in spans.values()])
        angles = positions[:, None] * torch.logspace(0, -3, 32).repeat(2)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(positions), self.config.hidden_size, generator=generator) * SMALL
        x, cos, sin = (
            each.to(self.attention.shape.dtype).to(self.attention.device)
            for each in (x, angles.cos(), angles.sin())
        )
        inputs = StepInputs(positions, positions, metadata, self.cache)
        return self.made(x, cos, sin, inputs).cpu().float()

    def pages(self) -> Iterator[Tensor]:
        return (each[1:].cpu().float() for each in self.cache.tensors)


def layers(form: str) -> tuple[Layer, Layer]:
    """Of a rank of V3, joined, on the stand-in in bfloat16, and by plain torch in float32."""
    config = replace(decoder_config(DEEPSEEK_V3), num_heads=8, quantization=None)
    if form == "int8":
        config = replace(config, quantization=Quantization(ignore=(), is_stored=True))
    wide_config = replace(config, dtype="float32")
    own = start(section("npu", virtual_fp32=False))
    assert isinstance(own, Npu)
    own.product = replace(own.product, joins_latents=True)
    ops, attention = own.operators(shape_of(PAGE, config))
    assert isinstance(attention, LatentAttention)
    plain = LatentAttention(shape_of(PAGE, wide_config))
    return Layer(config, ops, attention), Layer(wide_config, CpuOps(), plain)


@pytest.mark.parametrize("form", first_quick(1, ["plain", "int8"]))
def test_a_layer_of_the_published_sizes_is_that_of_a_cpu(form: str) -> None:
    """A prompt and a decode, then decodes and a few guesses, which read what both ways have written."""
    joined, plain = layers(form)
    assert joined.made.joins
    assert not plain.made.joins
    steps = ({0: (0, 20), 1: (0, 1)}, {0: (20, 21), 1: (1, 4), 2: (0, 1)}, {1: (4, 5), 0: (21, 22)})
    for seed, spans in enumerate(steps):
        found, expected = (each.step(spans, seed) for each in (joined, plain))
        assert float((found - expected).norm() / expected.norm()) < ROUNDED[form]
    for ours, theirs in zip(joined.pages(), plain.pages()):
        assert float((ours - theirs).norm() / theirs.norm()) < ROUNDED[form] / 2


@pytest.mark.usefixtures("joining")
def test_ranks_have_heads_of_their_own(checkpoint: tuple[Any, Path]) -> None:
    """Of queries, whose rows are not moved here, and in the same order."""
    config = config_in(checkpoint[1])
    machine, found = machines.start(section("npu")), []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        part = Share(rank, size).part(config)
        ops, attention = machine.operators(shape_of(PAGE, part))
        decoder = Decoder(config, ops, attention, Rank(rank, size))
        weights.load(decoder, checkpoint[1])
        prolog = decoder.layers[1].attention.prolog
        found.append([each.cpu() for each in (*prolog.linears.weights, prolog.up.keys)])
    (down, up, latents, keys), first, second = found
    assert torch.equal(torch.cat((first[1], second[1]), 1), up)
    assert torch.equal(torch.cat((first[3], second[3])), keys)
    assert all(torch.equal(each[0], down) and torch.equal(each[2], latents) for each in (first, second))
