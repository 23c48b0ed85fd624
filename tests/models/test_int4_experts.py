"""Experts that stay in 4 bits answer as transformers does with the numbers that their words stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams
from devices.ascend_limits import product
from models.checkpoint import weights
from models.checkpoint.int4 import check_groups, inputs_of_experts, kept_int4, largest_side
from models.config import DecoderConfig
from models.layers.mixture import Mixture
from recipes.assembly.engine import build
from recipes.assembly.families import config_in
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, machine, npu, on_each, settings
from tests.models.families import followed, make, wide
from tests.models.packed_checkpoints import store
from tests.models.tensor_rank import logits_of
from tests.models.test_block_scales import fill
from tests.models.test_int4 import BY_NAME, KEPT, built
from tests.models.test_shared_weights import part_of
from tests.models.test_weights import bare

SIZES = {"hidden_size": 128, "intermediate_size": 192}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
NAMES = {"qwen3_moe": EXPERTS, "mixtral": {}, "qwen2_moe": EXPERTS}
NUM_NEW = 8


def stored(name: str, form: str, root: Path, **options: Any) -> tuple[Any, Path]:
    """Transformers' model of what is stored, with heads of 64, and the directory."""
    torch.manual_seed(0)
    variant = wide(replace(BY_NAME[name], shard_size="5GB", saved_as=torch.float32))
    sizes = SIZES | {key: size for key, size in NAMES[name].items() if key in variant.options}
    model, path = make(replace(variant, options=variant.options | sizes | options), root)
    fill(model, store(path, KEPT[form]))
    return model, path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Any, Path]]:
    """What is stored of a name and a form, once for all tests that read it."""
    return cache(lambda name, form: stored(name, form, tmp_path_factory.mktemp("stored")))


def kept(path: Path, **changes: Any) -> DecoderConfig:
    """In 4 bits."""
    return kept_int4(replace(config_in(path), dtype="float32", **changes))


def each_on_each() -> list[Any]:
    """Every form of one family, and the others in some of them, on each device.

    What a form becomes does not hang on the device: an NPU has words with offsets and without, in groups and
    by channels, and each family; the rest is slow.
    """
    quick = {("qwen3_moe", "packed_zeros"), ("mixtral", "packed_by_channel"), ("qwen2_moe", "awq")}
    others = [("mixtral", "gptq"), ("mixtral", "packed_by_channel"), ("qwen2_moe", "awq")]
    return [
        pytest.param(
            *each.values,
            *case,
            id=f"{each.id}-{'-'.join(case)}",
            marks=[*each.marks, *([] if each.values[0][0] == "cpu" or case in quick else [pytest.mark.slow])],
        )
        for each in on_each("fused")
        for case in [*(("qwen3_moe", form) for form in KEPT), *others]
    ]


@pytest.mark.parametrize(("device", "name", "form"), each_on_each())
def test_an_engine_answers_as_transformers_does(
    device: tuple[Kind, Way],
    name: str,
    form: str,
    shared: Callable[[str, str], tuple[Any, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks, with a prefix that is shared; on an NPU in captured steps too."""
    model, path = shared(name, form)
    asked = {"model.path": path, "model.quantization": "w4a16", "cache.num_pages": 40, "cache.page_size": 16}
    asked |= {"scheduler.num_slots": 4, "scheduler.max_batch_tokens": 32, "model.dtype": "float32"}
    asked |= {"scheduler.max_request_tokens": 128, "device.graphs": 4 if device[0] == "npu" else 0}
    if npu() == "real" and device[0] == "npu":
        pytest.skip("a real NPU takes no float32")
    if device[0] == "npu":  # which the stand-in takes, and no product
        machine(*device)
        monkeypatch.setattr("models.ops.npu.int4_ops.Int4Check.check_int4", lambda *_: None)
    texts = [
        *settings(device[0]),
        *(f"{key}={value}" for key, value in asked.items()),
        "cache.memory_gib=null",
    ]
    engine = build(load(ROOT / "recipes/any/cpu.yaml", texts)).engine
    tokens = np.random.default_rng(4).integers(0, 160, 50)
    for number, prompt in enumerate((tokens, np.concatenate((tokens[:32], tokens[:7])))):
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=0, ignore_eos=True)
        request = Request(str(number), prompt, params)
        engine.add(request)
        while engine.has_work:
            engine.step()
        answer = request.answer.tolist()
        best_tokens, expected = followed(model, prompt.tolist(), answer, NUM_NEW)
        assert answer == best_tokens
        found = torch.tensor([line.logprob for line in request.logprobs])
        best = expected[torch.arange(NUM_NEW), answer]
        torch.testing.assert_close(found, best.float(), rtol=0, atol=1e-4)


@pytest.mark.npu
@pytest.mark.parametrize("device", on_each("fused")[1:2])
def test_an_npu_multiplies_all_experts_in_two_products(device: tuple[Kind, Way], tmp_path: Path) -> None:
    """And layers whose numbers have no offsets share the zeros that the operator wants."""
    _, path = stored("qwen3_moe", "packed", tmp_path)
    made = built(kept(path), path, *device)
    joined = [layer.mlp._joined for layer in made.layers if isinstance(layer.mlp, Mixture)]
    assert len(joined) == 2
    assert all(each.weight.dtype == torch.int32 for both in joined for each in both)
    one, other = (both[0].beside["antiquant_offset"][0] for both in joined)
    assert one.data_ptr() == other.data_ptr()
    assert not one.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["awq", "packed"])
def test_what_is_planned_is_what_is_held(
    name: str, form: str, shared: Callable[[str, str], tuple[Any, Path]]
) -> None:
    _, path = shared(name, form)
    for config in (config_in(path), kept(path)):
        assert config.weight_bytes == sum(weight.nbytes for weight in bare(config).parameters())
    halves = replace(config_in(path), dtype="bfloat16")
    count = halves.mixture.num_experts
    assert kept_int4(halves).bytes_of_experts(count) < 0.36 * halves.bytes_of_experts(count)


def test_ranks_that_divide_experts_hold_their_words_and_groups(tmp_path: Path) -> None:
    _, path = stored("mixtral", "awq", tmp_path)
    config = kept(path)
    check_groups(config, 2)
    parts = [part_of(config, *rank) for rank in ((0, 1), (0, 2), (1, 2))]
    for decoder in parts:
        decoder.pack = lambda: None
        weights.load(decoder, path)
    for number in "03":
        whole, *cut = (decoder.layers[1].mlp.experts[number] for decoder in parts)
        for name in ("weight", "weight_scale", "weight_offset"):
            assert torch.equal(
                torch.cat([getattr(each.down, name) for each in cut], 1), getattr(whole.down, name)
            )


def test_experts_are_divided_by_whole_groups_alone(tmp_path: Path) -> None:
    _, path = stored("qwen3_moe", "awq", tmp_path, moe_intermediate_size=96)
    with pytest.raises(
        ValueError, match="the 96 inputs of an expert's down_proj by 2: groups of 32 stay whole"
    ):
        check_groups(kept(path), 2)
    check_groups(kept(path), 2, 2)  # each rank has whole experts


def test_a_product_takes_whole_groups_of_experts_alone(tmp_path: Path) -> None:
    _, path = stored("qwen3_moe", "packed_zeros", tmp_path, moe_intermediate_size=96)
    config = kept(path)
    assert inputs_of_experts(config) == (128, 96)
    given = torch.bfloat16, config.kept_form.group_size, largest_side(config)
    with pytest.raises(
        ValueError, match=r"of 96 inputs, of which 64 share a scale; .* take whole groups alone"
    ):
        product("910B", "").check_int4(*given, inputs_of_experts(config))
    product("910B", "").check_int4(*given, (128, 192))
    assert torch.isfinite(logits_of(built(config, path))).all()
