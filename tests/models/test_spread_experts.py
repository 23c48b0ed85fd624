"""Ranks that hold whole experts, wherever these lie, compute what transformers does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.reference import Attention
from models.checkpoint import weights
from models.checkpoint.files import SINGLE
from models.config import DecoderConfig, MixtureConfig, layer_specs
from models.decoder import Decoder
from models.ops.cpu.ops import CpuOps
from models.ops.reference import Ops
from models.parallel.group import ALONE, Group
from models.parallel.share import Share
from models.quantization import Quantization
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import decoder_config, read
from tests.models.families import VARIANTS, expected_logprobs, make
from tests.models.tensor_rank import PAGE_SIZE, STOPS, built, empty, logits_of, table
from tests.models.test_random_shares import drawn, logits_with, together
from tests.models.test_shared_weights import Rank
from tests.thorough import cases, first_quick

FAMILIES = ("mixtral", "qwen2_moe", "glm4_moe_groups", "deepseek_v2")
OPTIONS: dict[str, dict[str, Any]] = {"qwen2_moe": {"num_experts": 8}}


def checkpoint(name: str, root: Path) -> tuple[Any, Path]:
    variant = next(each for each in VARIANTS if each.name == name)
    options = variant.options | OPTIONS.get(name, {})
    return make(replace(variant, options=options, saved_as=torch.float32, shard_size="5GB"), root)


@pytest.mark.parametrize("name", first_quick(2, FAMILIES))
def test_spread_experts_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, path = checkpoint(name, tmp_path)
    slots = table(empty(decoder_config(read(path)), ALONE))
    prompts = [slots.token_ids[row, : max(stops)].tolist() for row, stops in enumerate(zip(*STOPS))]
    theirs = [expected_logprobs(model, prompt) for prompt in prompts]
    expected = torch.stack([theirs[row][stop - 1] for stops in STOPS for row, stop in enumerate(stops)])
    for size, experts in ((2, 1), (2, 2), (4, 2)):

        def logits(group: Group, experts: int = experts) -> Tensor:
            return logits_of(built(path, group, experts=experts)[0])

        for found in together(size, logits):
            torch.testing.assert_close(found.log_softmax(-1), expected, rtol=0, atol=1e-4)
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


def mixed(rng: random.Random, *, is_placed: bool) -> DecoderConfig:
    """Any decoder with experts, which may lie in any order in each layer."""
    config = drawn(rng)
    num_heads, inner = rng.choice([4, 8]), rng.choice([16, 24])
    count = rng.choice([4, 8, 12])
    mixture = MixtureConfig(
        count,
        rng.randint(1, 4),
        inner,
        normalizes=rng.random() < 0.5,
        scores=rng.choice(["softmax", "sigmoid"]),
        shared_size=rng.choice([0, 8]),
        placement=tuple(tuple(rng.sample(range(count), count)) for _ in range(2)) if is_placed else (),
    )
    return replace(
        config,
        layers=layer_specs(config.windows, (True, rng.random() < 0.5)),
        num_heads=num_heads,
        num_kv_heads=4,
        intermediate_size=48,
        mlp_bias=rng.random() < 0.5,
        mixture=mixture,
    )


@pytest.mark.parametrize("seed", first_quick(3, range(cases(5, 200))))
def test_any_experts_anywhere_compute_what_one_rank_does(seed: int) -> None:
    rng = random.Random(seed)
    config = mixed(rng, is_placed=rng.random() < 0.7)
    assert config.mixture is not None
    expected = logits_with(replace(config, mixture=replace(config.mixture, placement=())), ALONE, seed)
    for size, experts in rng.sample([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)], 2):
        parts = together(size, lambda group, experts=experts: logits_with(config, group, seed, experts))
        for found in parts:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            assert torch.equal(found, parts[0]), "ranks have the same logits, to the bit"


@pytest.mark.parametrize(("size", "experts"), [(2, 2), (4, 2)])
def test_spread_experts_in_int8_have_the_weights_of_one_rank(size: int, experts: int) -> None:
    config = replace(mixed(random.Random(3), is_placed=True), quantization=Quantization(is_stored=False))

    def held(group: Group) -> dict[str, Any]:
        decoder = empty(config, group, experts=experts if group.size > 1 else 1)
        weights.random(decoder, 3)
        return {name: each.packed for name, each in decoder.named_modules() if hasattr(each, "packed")}

    parts, whole = together(size, held), held(ALONE)
    names = [name for name in whole if ".mlp.experts." in name and name.endswith("down")]
    assert names
    for name in names:
        weight, scale, _ = whole[name]
        mine = [part[name] for part in parts if name in part]
        assert len(mine) == size // experts
        assert torch.equal(torch.cat([each[0] for each in mine], dim=1), weight)
        assert all(torch.equal(each[1], scale) for each in mine)


def test_experts_in_several_files_become_int8_as_they_come(tmp_path: Path) -> None:
    """Ranks of different parts read other experts, from other files, and no rank waits for another."""
    variant = next(each for each in VARIANTS if each.name == "qwen3_moe")
    path = make(replace(variant, saved_as=torch.float32, shard_size="30KB"), tmp_path)[1]

    def held(group: Group) -> dict[str, Any]:
        parts = 2 if group.size > 1 else 1
        decoder, _ = built(path, group, experts=parts, int8_at_load=True)
        return {name: each.packed for name, each in decoder.named_modules() if hasattr(each, "packed")}

    parts, whole = together(4, held), held(ALONE)
    for name in (name for name in whole if ".mlp.experts." in name and name.endswith("down")):
        mine = [part[name] for part in parts if name in part]
        assert torch.equal(torch.cat([each[0] for each in mine], dim=1), whole[name][0])
        assert all(torch.equal(each[1], whole[name][1]) for each in mine)


def of_rank(config: DecoderConfig, rank: int, size: int, experts: int, kind: type[Ops] = Ops) -> Decoder:
    share = Share(rank, size, experts=experts)
    attention = Attention(shape_of(PAGE_SIZE, share.part(config)))
    group = Rank(rank, size)
    group.few = Rank(*share.of_an_expert)
    return Decoder(config, kind(), attention, group, share)


@pytest.mark.parametrize("placement", [(), ((6, 1, 3, 0, 7, 5, 2, 4), (), (4, 0, 1, 2, 7, 6, 5, 3))])
@pytest.mark.parametrize(("size", "experts"), [(2, 2), (4, 2), (4, 4)])
def test_a_rank_reads_its_own_experts_alone(
    placement: tuple[tuple[int, ...], ...], size: int, experts: int, tmp_path: Path
) -> None:
    path = checkpoint("qwen3_moe", tmp_path)[1]
    tensors = load_file(path / SINGLE)
    config = decoder_config(read(path))
    assert config.mixture is not None
    config = replace(config, mixture=replace(config.mixture, placement=placement))
    of_one = sum(each.nbytes for key, each in tensors.items() if ".0.mlp.experts.3." in key)
    for rank in range(size):
        spread = of_rank(config, rank, size, experts)
        divided = of_rank(config, rank, size, 1)
        assert weights.load(spread, path) == weights.load(divided, path)
        assert spread.part.bytes_of_experts(8 // experts) == 2 * 8 * of_one // size
        for number in (0, 2):
            layer = spread.layers[number].mlp
            order = placement[number] if placement else range(8)
            mine = order[rank * experts // size * 8 // experts :][: 8 // experts]
            assert list(layer.experts) == [str(each) for each in mine]
            for each in mine:
                name = f"model.layers.{number}.mlp.experts.{each}.gate_proj.weight"
                inner = 24 * experts // size
                first = rank % (size // experts) * inner
                weight, _ = layer.experts[str(each)].gate_up.packed
                assert torch.equal(weight[:inner], tensors[name][first : first + inner])


def test_every_rank_names_a_surplus_expert_and_its_own_that_is_missing(tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe", tmp_path)[1]
    tensors, name = load_file(path / SINGLE), "model.layers.0.mlp.experts.{}.up_proj.weight"
    tensors[name.format(8)] = tensors.pop(name.format(6)).clone()
    save_file(tensors, path / SINGLE)
    for rank in range(2):
        with pytest.raises(ValueError, match="are not those of") as caught:
            weights.load(of_rank(decoder_config(read(path)), rank, 2, 2), path)
        assert f"surplus: {name.format(8)}" in str(caught.value)
        assert (f"missing: {name.format(6)}" in str(caught.value)) == (rank == 1)


def test_a_processor_computes_its_own_experts_rows_as_plain_torch_does(tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe", tmp_path)[1]
    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(5))
    for rank in range(2):
        made = []
        for kind in (Ops, CpuOps):
            decoder = of_rank(decoder_config(read(path)), rank, 2, 2, kind)
            weights.load(decoder, path)
            made.append(decoder.layers[0].mlp(x))
        torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "experts", "words"),
    [
        (2, 3, "8 experts cannot be spread evenly over 3 parts of 2 tensor ranks; choose one of 1, 2$"),
        (4, 8, "over 8 parts of 4 tensor ranks; choose one of 1, 2, 4$"),
        (6, 3, "over 3 parts of 6 tensor ranks; choose one of 1, 2$"),
        (
            32,
            2,
            "^32 tensor ranks cannot share 4 query heads.* with experts in 2 parts; choose one of 2, 4$",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused_with_those_that_can(size: int, experts: int, words: str) -> None:
    variant = next(each for each in VARIANTS if each.name == "qwen3_moe")
    assert variant.options["num_experts"] == 8
    config = mixed(random.Random(1), is_placed=False)
    assert config.mixture is not None
    mixture = replace(config.mixture, num_experts=8, inner_size=24)
    config = replace(config, num_heads=4, mixture=mixture)
    with pytest.raises(ValueError, match=words):
        Share(0, size, experts=experts).part(config)


def test_a_stage_has_the_places_of_its_layers() -> None:
    config = mixed(random.Random(4), is_placed=True)
    assert config.mixture is not None
    first, second = config.mixture.placement
    half = config.mixture.num_experts // 2
    for stage, places in enumerate((first, second)):
        for rank in range(2):
            part = Share(rank, 2, stage, 2, experts=2).part(config)
            assert part.mixture is not None
            assert tuple(part.mixture.held_in(0)) == places[rank * half :][:half]


def test_a_dense_model_has_nothing_to_spread() -> None:
    with pytest.raises(ValueError, match="the model has no experts to spread over 2 parts of the ranks"):
        Share(0, 2, experts=2).part(drawn(random.Random(0)))
