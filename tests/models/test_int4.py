"""Linears and experts that stay in 4 bits compute what the checkpoint's numbers do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.request import Request, SamplingParams
from devices.ascend_limits import product
from models.checkpoint import weights
from models.checkpoint.int4 import check_groups, inputs_of_experts, kept_int4, largest_side
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.mixture import Mixture
from models.ops.operands import Int4Weight
from models.parallel.group import ALONE
from recipes.assembly.engine import build
from recipes.assembly.families import config_in
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, machine, npu, on_each, settings
from tests.models.families import VARIANTS, followed, make, wide
from tests.models.packed_checkpoints import AWQ, FORMS, GPTQ, Form, compressed, store
from tests.models.tensor_rank import empty, logits_of
from tests.models.test_block_scales import fill
from tests.models.test_shared_weights import part_of
from tests.models.test_weights import bare
from tests.thorough import cases, first_quick

BY_NAME = {variant.name: variant for variant in VARIANTS}
SIZES = {"hidden_size": 96, "intermediate_size": 160}
MOE = {"moe_intermediate_size": 64}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "mixtral": {},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 64},
}
NUM_NEW = 8
KEPT: dict[str, Form] = {
    "awq": Form(AWQ | {"group_size": 32}, group=32),
    "gptq": Form(GPTQ | {"group_size": 32}, group=32),
    "packed": Form(compressed(4, "group", True, group_size=32), group=32, has_zeros=False),
    "packed_zeros": Form(compressed(4, "group", False, group_size=64), group=64),
    "packed_by_channel": Form(compressed(4, "channel", True), group=0, has_zeros=False),
}
FEW_FORMS = ("packed_zeros", "packed_by_channel")


def stored(name: str, form: str | Form, root: Path, **options: Any) -> tuple[Any, Path]:
    """Transformers' model of what is stored, with heads of 64, and the directory."""
    torch.manual_seed(0)
    variant = wide(replace(BY_NAME[name], shard_size="5GB", saved_as=torch.float32))
    variant = replace(variant, options=variant.options | SIZES | options)
    model, path = make(variant, root)
    fill(model, store(path, KEPT[form] if isinstance(form, str) else form))
    return model, path


def built(config: DecoderConfig, path: Path, kind: Kind = "cpu", way: Way | None = None) -> Decoder:
    decoder = empty(config, ALONE, kind, way)
    weights.load(decoder, path)
    return decoder


@pytest.mark.parametrize("form", KEPT)
def test_numbers_and_scales_are_those_of_the_file(form: str, tmp_path: Path) -> None:
    _, path = stored("llama_biased", form, tmp_path)
    config = config_in(path)
    exact, kept = bare(config), bare(kept_int4(config))
    for decoder in (exact, kept):
        decoder.pack = lambda: None
        weights.load(decoder, path)
    for one, other in zip(exact.layers, kept.layers):
        pairs = (one.mlp.gate_up, other.mlp.gate_up), (one.mlp.down, other.mlp.down)
        for plain, linear in (*pairs, (one.attention.qkv, other.attention.qkv)):
            offset = None if linear.weight_offset is None else linear.weight_offset.data
            size = KEPT[form].group or plain.weight.shape[1]
            found = Int4Weight(linear.weight.data, linear.weight_scale.data, offset, size).weight()
            assert torch.equal(found, plain.weight)


@pytest.mark.parametrize("device", on_each("fused"))
@pytest.mark.parametrize(
    ("name", "form"),
    [("phi3", "awq"), *(("llama_biased", form) for form in cases(FEW_FORMS, KEPT))],
)
def test_a_step_computes_what_the_stored_numbers_do(
    device: tuple[Kind, Way], name: str, form: str, tmp_path: Path
) -> None:
    """Of linears that are stored joined, too."""
    _, path = stored(name, form, tmp_path)
    config = replace(config_in(path), dtype="float32")
    expected = logits_of(built(config, path))
    found = logits_of(built(kept_int4(config), path, *device))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("form", ["awq", "packed", "packed_by_channel"])
def test_each_rank_holds_its_words_and_groups(form: str, tmp_path: Path) -> None:
    _, path = stored("llama_biased", form, tmp_path, intermediate_size=256)
    config = kept_int4(replace(config_in(path), dtype="float32"))
    check_groups(config, 2)
    whole, first, second = part_of(config, 0, 1), part_of(config, 0, 2), part_of(config, 1, 2)
    for decoder in (whole, first, second):
        decoder.pack = lambda: None
        weights.load(decoder, path)
    one, *parts = (decoder.layers[1] for decoder in (whole, first, second))
    for name in ("weight", "weight_scale", "weight_offset"):
        if (joined := getattr(one.mlp.down, name)) is None:
            continue
        down = [getattr(part.mlp.down, name) for part in parts]
        is_shared = joined.shape[1] == 1  # the scale of a whole row
        assert torch.equal(down[0] if is_shared else torch.cat(down, 1), joined)
        ups = [getattr(part.mlp.gate_up, name).chunk(2)[1] for part in parts]
        assert torch.equal(torch.cat(ups), getattr(one.mlp.gate_up, name).chunk(2)[1])


def test_random_weights_are_those_of_any_number_of_ranks(tmp_path: Path) -> None:
    _, path = stored("qwen3", "awq", tmp_path, intermediate_size=256)
    config = kept_int4(replace(config_in(path), dtype="float32"))
    downs = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        decoder = part_of(config, rank, size)
        decoder.pack = lambda: None
        weights.random(decoder, 7)
        downs.append(decoder.layers[0].mlp.down)
    whole, *parts = downs
    assert torch.equal(torch.cat([part.weight for part in parts], 1), whole.weight)
    assert torch.equal(parts[0].weight_scale[:, :1], whole.weight_scale[:, :1])


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("qwen3", None, "packed in 4 bits, and the checkpoint's are not packed"),
        ("qwen3", "gptq_8_bits", "the checkpoint's are gptq of 8 bits by channel"),
        ("qwen3", "gptq_by_activation", "desc_act or actorder moves them"),
        ("deepseek_v3_one_group", "awq", "latents, which have no products in 4 bits"),
    ],
)
def test_what_cannot_stay_packed_is_refused(name: str, form: str | None, words: str, tmp_path: Path) -> None:
    _, path = make(replace(BY_NAME[name], shard_size="5GB"), tmp_path)
    if form is not None:
        store(path, FORMS[form])
    with pytest.raises(ValueError, match=words):
        kept_int4(config_in(path))


def test_inputs_that_a_file_moves_between_groups_are_refused(tmp_path: Path) -> None:
    """GPTQ's files have `g_idx`, in order or not, whatever `desc_act` says."""
    _, path = stored("qwen3", "gptq", tmp_path)
    name = "model.layers.0.self_attn.o_proj.g_idx"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: tensors[name].flip(0).contiguous()}, file)
    with pytest.raises(ValueError, match=r"o_proj\.weight: its inputs are not in the order of their groups"):
        built(kept_int4(config_in(path)), path)


def test_ranks_do_not_divide_a_group(tmp_path: Path) -> None:
    """Nor a word, of which a short group takes a part."""
    _, path = stored("qwen3", "awq", tmp_path)
    config = kept_int4(config_in(path))
    assert config.kept_form is not None
    short = replace(config, intermediate_size=168, kept_form=replace(config.kept_form, group_size=4))
    for each, inputs, size in ((config, 160, 32), (short, 168, 8)):
        words = f"cannot divide the {inputs} inputs of down_proj by 2: each rank takes a multiple of {size},"
        with pytest.raises(ValueError, match=words):
            check_groups(each, 2)
        check_groups(each, 1)
    check_groups(replace(short, intermediate_size=176), 2)


def test_what_is_multiplied_as_one_stays_packed_as_one(tmp_path: Path) -> None:
    _, path = stored("qwen3", "awq", tmp_path)
    config = config_in(path)
    left_out = replace(config.stored_form, ignore=("re:.*up_proj",))
    with pytest.raises(ValueError, match=r"leaves out some of mlp\.gate_proj, mlp\.up_proj of layer 0"):
        kept_int4(replace(config, stored_form=left_out))


@pytest.mark.parametrize("device", on_each("fused"))
@pytest.mark.parametrize(
    ("name", "form", "said", "left_out"),
    [
        ("phi3", "awq", {"modules_to_not_convert": ["qkv_proj"]}, "qkv_proj"),
        ("phi3", "gptq", {"dynamic": {"-:.*gate_up_proj": {}}}, "gate_up_proj"),
        ("glm4", "packed", {"ignore": ["lm_head", "re:.*gate_up_proj"]}, "gate_up_proj"),
    ],
)
def test_a_linear_that_is_stored_joined_is_left_out_by_that_name(
    device: tuple[Kind, Way], name: str, form: str, said: dict[str, Any], left_out: str, tmp_path: Path
) -> None:
    """By that name a file leaves it plain, and the others are packed."""
    packed = KEPT[form]
    _, path = stored(name, replace(packed, said=packed.said | said, left_out=left_out), tmp_path)
    config = replace(config_in(path), dtype="float32")
    made = built(kept_int4(config), path, *device)
    layer = made.layers[0]
    by_name = {
        "qkv_proj": layer.attention.qkv,
        "gate_up_proj": layer.mlp.gate_up,
        "down_proj": layer.mlp.down,
    }
    assert [each for each, linear in by_name.items() if linear.form == "plain"] == [left_out]
    torch.testing.assert_close(logits_of(made), logits_of(built(config, path)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "group", "largest", "words"),
    [
        ("310P", 128, 100, "the 310P multiplies no weights of 4 bits, 910B, 910C do"),
        ("910B", 16, 100, "16 inputs of a linear share a scale.*a multiple of 32"),
        ("910C", 128, 65536, "a linear has a side of 65536.*use more tensor ranks"),
    ],
)
def test_a_product_says_what_it_cannot_multiply(name: str, group: int, largest: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        product(name, "").check_int4(torch.float16, group, largest)
    product("910B", "").check_int4(torch.float16, 128, 65535)


@pytest.mark.npu
@pytest.mark.parametrize("device", on_each("fused")[1:2])
@pytest.mark.parametrize("dtype", cases(["bfloat16"], ["float16", "bfloat16"]))
def test_an_npu_multiplies_in_half_the_precision(
    device: tuple[Kind, Way], dtype: Any, tmp_path: Path
) -> None:
    """Captured steps are the eager ones, and as near to what is exact as plain products of the same type."""
    _, path = stored("qwen2_yarn", "awq", tmp_path)
    config = config_in(path)
    exact = logits_of(built(replace(config, dtype="float32"), path))
    halves = replace(config, dtype=dtype)
    plain, kept = (logits_of(built(each, path, *device)) for each in (halves, kept_int4(halves)))
    assert (kept - exact).norm() <= 2 * (plain - exact).norm()
    captured = logits_of(built(kept_int4(halves), path, *device), graphs=True)
    assert torch.equal(captured, kept)
    assert machine(*device).device.type == "npu"


def stored_experts(name: str, form: str, root: Path, **options: Any) -> tuple[Any, Path]:
    """The same of a model with experts, whose inputs are whole groups."""
    sizes = {"hidden_size": 128, "intermediate_size": 192} | EXPERTS[name]
    return stored(name, form, root, **sizes | options)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Any, Path]]:
    """What is stored of a name and a form, once for all tests that read it."""
    return cache(lambda name, form: stored_experts(name, form, tmp_path_factory.mktemp("stored")))


def kept(path: Path, **changes: Any) -> DecoderConfig:
    """In 4 bits."""
    return kept_int4(replace(config_in(path), dtype="float32", **changes))


# Each family; words with offsets and without, in groups and by channels, whose forms test_int4.py has
FEW = [("qwen3_moe", "packed_zeros"), ("mixtral", "packed_by_channel"), ("qwen2_moe", "awq")]


@pytest.mark.parametrize(("name", "form"), first_quick(1, cases(FEW, [*itertools.product(EXPERTS, KEPT)])))
@pytest.mark.parametrize("device", on_each("fused"))
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
    _, path = stored_experts("qwen3_moe", "packed", tmp_path)
    made = built(kept(path), path, *device)
    joined = [layer.mlp._joined for layer in made.layers if isinstance(layer.mlp, Mixture)]
    assert len(joined) == 2
    assert all(each.weight.dtype == torch.int32 for both in joined for each in both)
    one, other = (both[0].beside["antiquant_offset"][0] for both in joined)
    assert one.data_ptr() == other.data_ptr()
    assert not one.any()


def test_experts_are_divided_by_whole_groups_alone(tmp_path: Path) -> None:
    _, path = stored_experts("qwen3_moe", "awq", tmp_path, moe_intermediate_size=96)
    with pytest.raises(
        ValueError, match="the 96 inputs of an expert's down_proj by 2: each rank takes a multiple of 32"
    ):
        check_groups(kept(path), 2)
    check_groups(kept(path), 2, 2)  # each rank has whole experts


def test_a_product_takes_whole_groups_of_experts_alone(tmp_path: Path) -> None:
    _, path = stored_experts("qwen3_moe", "packed_zeros", tmp_path, moe_intermediate_size=96)
    config = kept(path)
    assert inputs_of_experts(config) == (128, 96)
    given = torch.bfloat16, config.kept_form.group_size, largest_side(config)
    with pytest.raises(
        ValueError, match=r"of 96 inputs, of which 64 share a scale; .* take whole groups alone"
    ):
        product("910B", "").check_int4(*given, inputs_of_experts(config))
    product("910B", "").check_int4(*given, (128, 192))
    assert torch.isfinite(logits_of(built(config, path))).all()


@pytest.mark.parametrize("name", ["qwen3", *EXPERTS])
@pytest.mark.parametrize("form", ["awq", "packed", "packed_by_channel"])
def test_what_is_planned_is_what_is_held(name: str, form: str, tmp_path: Path) -> None:
    _, path = (stored_experts if name in EXPERTS else stored)(name, form, tmp_path)
    config = config_in(path)
    for each in (kept_int4(config), config):
        assert each.weight_bytes == sum(weight.nbytes for weight in bare(each).parameters())
    assert kept_int4(config).weight_bytes < 0.6 * config.weight_bytes
    if config.mixture is not None:
        halves, count = replace(config, dtype="bfloat16"), config.mixture.num_experts
        assert kept_int4(halves).bytes_of_experts(count) < 0.36 * halves.bytes_of_experts(count)
