"""A mixture gives each token what its own experts make of it, whatever its neighbours choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from devices.shapes import AttentionShape
from models.checkpoint import weights
from models.config import DecoderConfig, MixtureConfig
from models.decoder import Decoder
from models.layers.mixture import Mixture
from models.ops.cpu.ops import CpuOps
from models.ops.cuda.ops import CudaOps
from models.ops.operands import ExpertKind, UnpackedLinear
from models.ops.reference import Ops
from models.quantization import Quantization
from recipes.assembly.families import decoder_config, read
from recipes.assembly.int8_checkpoint import quantize
from tests.device_kinds import has_npu, npu, operators
from tests.each_of import each_of
from tests.interpreter import DEVICE
from tests.models.families import VARIANTS, make
from tests.recipes.published import MIXTRAL_8X7B, QWEN3_30B_A3B

HIDDEN, EXPERTS, CHOSEN = 12, 5, 2
IMPLEMENTATIONS = [Ops, CpuOps]


def experts(seed: int) -> list[Callable[[Tensor], Tensor]]:
    """Element by element, so that a row's bits cannot depend on the number of rows."""
    scales = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return [lambda x, scale=scale: (x * scale).tanh() for scale in scales]


def routed(num_tokens: int, normalizes: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, router = (
        torch.randn(num_tokens, HIDDEN, generator=generator),
        torch.randn(EXPERTS, HIDDEN, generator=generator),
    )
    return x, *Ops().route(x, router, None, mixture_of(normalizes))


def mixture_of(normalizes: bool) -> MixtureConfig:
    return MixtureConfig(EXPERTS, CHOSEN, HIDDEN, normalizes)


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_router_weighs_the_best_by_their_chances(normalizes: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, router = torch.randn(7, HIDDEN, generator=generator), torch.randn(EXPERTS, HIDDEN, generator=generator)
    found, chosen = Ops().route(x.bfloat16(), router, None, mixture_of(normalizes))
    assert found.dtype == torch.float32
    for token, (weight, numbers) in enumerate(zip(found, chosen)):
        scores = router.double() @ x[token].bfloat16().double()
        chances = scores.exp() / scores.exp().sum()
        best = sorted(range(EXPERTS), key=lambda each: -float(chances[each]))[:CHOSEN]
        assert numbers.tolist() == best
        expected = chances[best] / (chances[best].sum() if normalizes else 1)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=0)


@each_of("kind", IMPLEMENTATIONS)
@each_of("num_tokens", [1, 2, 9, 40])
def test_a_token_gets_the_weighted_sum_of_its_experts(kind: type[Ops], num_tokens: int) -> None:
    x, shares, chosen = routed(num_tokens, normalizes=False)
    made = experts(3)
    found = kind().mixture(x, shares, chosen, made)
    for token in range(num_tokens):
        pairs = zip(shares[token], chosen[token].tolist())
        expected = sum(share.double() * made[number](x[token]).double() for share, number in pairs)
        torch.testing.assert_close(found[token].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_a_token_has_the_same_bits_alone_and_among_others(kind: type[Ops]) -> None:
    x, shares, chosen = routed(40, normalizes=True)
    among = kind().mixture(x, shares, chosen, experts(3))
    for token in range(40):
        rows = slice(token, token + 1)
        assert torch.equal(kind().mixture(x[rows], shares[rows], chosen[rows], experts(3))[0], among[token])


def test_both_add_up_in_the_same_order() -> None:
    x, shares, chosen = routed(40, normalizes=True)
    ours, theirs = (kind().mixture(x, shares, chosen, experts(3)) for kind in IMPLEMENTATIONS)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_what_an_expert_makes_of_other_tokens_does_not_count(kind: type[Ops]) -> None:
    """Half precision overflows where an expert meets a token that it was not trained on."""
    x, shares, chosen = routed(6, normalizes=True)
    chosen[:] = torch.tensor([3, 1])
    made = [each if number in (1, 3) else lambda x: x / 0 for number, each in enumerate(experts(3))]
    assert kind().mixture(x, shares, chosen, made).isfinite().all()


def test_a_cpu_calls_no_expert_that_no_token_chose() -> None:
    seen: list[tuple[int, int]] = []

    def called(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: (seen.append((number, len(x))), x)[1]

    x = torch.ones(3, HIDDEN)
    chosen = torch.tensor([[4, 1], [1, 0], [4, 1]])
    CpuOps().mixture(x, torch.ones(3, 2), chosen, [called(number) for number in range(EXPERTS)])
    assert seen == [(0, 1), (1, 3), (4, 2)]


def checkpoint(name: str, root: Path, **more: Any) -> Path:
    variant = next(each for each in VARIANTS if each.name == name)
    return make(replace(variant, shard_size="5GB", saved_as=torch.float32, **more), root)[1]


def decoder(config: DecoderConfig, kind: type[Ops] = Ops) -> Decoder:
    shape = AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, 16, 1.0, torch.float32, config.windows
    )
    return Decoder(config, kind(), operators("cpu", "reference", shape)[1])


def loaded(path: Path, kind: type[Ops] = Ops, quantization: Quantization | None = None) -> Decoder:
    config = decoder_config(read(path))
    made = decoder(replace(config, quantization=quantization or config.quantization), kind)
    weights.load(made, path)
    return made


def mixtures(made: Decoder) -> list[Mixture]:
    return [layer.mlp for layer in made.layers if isinstance(layer.mlp, Mixture)]


@pytest.mark.parametrize("num_here", [EXPERTS, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_experts_whose_products_are_grouped_compute_what_each_does_alone(
    num_tokens: int, num_here: int
) -> None:
    """On a GPU in bfloat16, else in Triton's interpreter; of five experts, the last two may be elsewhere."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    generator, ops = torch.Generator().manual_seed(1), CudaOps(groups_products=True)
    kind = ExpertKind(16, 24)
    assert ops.joins_experts(kind)
    others = {"inner": 20}, {"form": "int8"}, {"form": "int4"}, {"is_swiglu": False}, {"has_bias": True}
    assert not any(ops.joins_experts(replace(kind, **other)) for other in others)
    assert not CudaOps(groups_products=True, batch_invariant=True).joins_experts(kind)
    gate_ups, downs = (
        [torch.randn(outer, inner, generator=generator) / 4 for _ in range(EXPERTS)]
        for outer, inner in ((48, 16), (16, 24))
    )
    x, router = (torch.randn(rows, 16, generator=generator) for rows in (num_tokens, EXPERTS))
    shares, chosen = Ops().route(x, router, None, mixture_of(normalizes=True))

    def expert(gate_up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda rows: Ops().swiglu(rows @ gate_up.T) @ down.T

    made = [expert(*each) for each in list(zip(gate_ups, downs))[:num_here]]
    expected = Ops().mixture(x, shares, chosen, made)
    there = [
        [UnpackedLinear(each.to(DEVICE, dtype)) for each in some[:num_here]] for some in (gate_ups, downs)
    ]
    packed = ops.pack_experts(*there)
    given = x.to(DEVICE, dtype), shares.to(DEVICE), chosen.to(DEVICE)
    found = ops.joined_mixture(*given, packed, EXPERTS, ops.swiglu).cpu().float()
    near = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    if num_tokens > 1:  # a row that is not finite stays alone
        given[0][0] = torch.nan
        spoilt = ops.joined_mixture(*given, packed, EXPERTS, ops.swiglu).cpu().float()
        assert torch.equal(spoilt[1:], found[1:])


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="there is no NPU here, nor a stand-in")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_tied", "mixtral", "gpt_oss_half"])
def test_experts_that_an_npu_joins_compute_what_each_does_alone(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    plain = loaded(path)
    config, dtype = plain.config, torch.float32 if npu() == "virtual" else torch.bfloat16
    heads = config.num_heads, config.num_kv_heads, 64
    ops, attention = operators("npu", "fused", AttentionShape(*heads, 16, 1.0, dtype, config.windows))
    joined = Decoder(replace(config, dtype=str(dtype).removeprefix("torch.")), ops, attention)
    weights.load(joined, path)
    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(5))
    near = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for ours, theirs in zip(mixtures(joined), mixtures(plain), strict=True):
        assert not ours.experts, "they were joined"
        for num_tokens in (1, 33):
            found = ours(x[:num_tokens].to(attention.device, dtype)).cpu().float()
            torch.testing.assert_close(found, theirs(x[:num_tokens]), rtol=near, atol=near)


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="there is no NPU here, nor a stand-in")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_joined_experts_in_int8_compute_what_each_does_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    path, scheme = checkpoint("qwen3_moe", tmp_path), Quantization(is_stored=False)
    config = replace(decoder_config(read(path)), dtype=str(dtype).removeprefix("torch."), quantization=scheme)
    found = []
    for kind in ("cpu", "npu"):
        heads = config.num_heads, config.num_kv_heads, 64
        ops, attention = operators(
            kind,
            "reference" if kind == "cpu" else "fused",
            AttentionShape(*heads, 16, 1.0, dtype, config.windows),
        )
        made = Decoder(config, ops, attention)
        weights.load(made, path)
        x = torch.randn(33, 48, generator=torch.Generator().manual_seed(5)).to(attention.device, dtype)
        found.append([mixture(x).cpu().float() for mixture in mixtures(made)])
        assert all(bool(mixture.experts) == (kind == "cpu") for mixture in mixtures(made))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


def test_scales_of_experts_are_rounded_as_published_ones_are(tmp_path: Path) -> None:
    path = checkpoint("mixtral", tmp_path)
    config = replace(decoder_config(read(path)), quantization=Quantization(is_stored=False))
    for dtype, wanted in (("bfloat16", torch.bfloat16), ("float16", torch.float32)):
        for mixture in mixtures(decoder(replace(config, dtype=dtype))):
            assert {expert.down.scale_dtype for expert in mixture.experts.values()} == {wanted}
            assert {expert.gate_up.scale_dtype for expert in mixture.experts.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_all_weights_are_counted(name: str, tmp_path: Path) -> None:
    model, path = make(next(each for each in VARIANTS if each.name == name), tmp_path)
    config = decoder_config(read(path))
    assert config.num_parameters == sum(each.numel() for each in model.parameters())
    for dtype in ("float32", "bfloat16"):
        asked = replace(config, dtype=dtype)
        held = sum(each.nbytes for each in decoder(asked).parameters())
        assert asked.weight_bytes == held, dtype
    stored = replace(config, quantization=Quantization())
    assert stored.weight_bytes == sum(each.nbytes for each in decoder(stored).parameters())


def test_published_models_have_the_parameters_that_their_names_say() -> None:
    qwen, mixtral = decoder_config(QWEN3_30B_A3B), decoder_config(MIXTRAL_8X7B)
    assert qwen.num_parameters == 30_532_122_624
    assert 3.3e9 < qwen.num_active_parameters < 3.4e9
    assert mixtral.num_parameters == 46_702_792_704
    assert round(mixtral.num_active_parameters / 1e9, 1) == 12.9
    idle = qwen.num_parameters - qwen.num_active_parameters
    embedding = qwen.vocab_size * qwen.hidden_size
    assert qwen.step_weight_bytes == qwen.weight_bytes - 2 * (idle + embedding)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_in_int8_are_the_same_stored_and_quantised_at_load(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    quantize(path, tmp_path / "int8")
    at_load = mixtures(loaded(path, quantization=Quantization(is_stored=False)))
    stored, plain = mixtures(loaded(tmp_path / "int8")), mixtures(loaded(path))
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(6))
    for ours, theirs, exact in zip(at_load, stored, plain, strict=True):
        assert all(expert.down.is_int8 and expert.gate_up.is_int8 for expert in ours.experts.values())
        assert torch.equal(ours(x), theirs(x))
        assert 0 < (ours(x) - exact(x)).norm() / exact(x).norm() < 0.05


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: 129; there are 128 experts"),
        ({"num_local_experts": 64}, "num_experts: 128; num_local_experts says 64: remove one"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: 3; it must be a list of layers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0; it must be an integer from 1"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match="the model's configuration has") as caught:
        decoder_config(QWEN3_30B_A3B | changed)
    assert line in str(caught.value)


def test_some_experts_of_a_layer_cannot_be_left_in_full() -> None:
    said = Quantization(("lm_head", "re:model.layers.1.mlp.experts.3.")).in_json()
    with pytest.raises(ValueError, match="ignore names some of the experts of layer 1: name all or none"):
        decoder_config(QWEN3_30B_A3B | {"quantization_config": said})
