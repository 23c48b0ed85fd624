"""Weights that a checkpoint stores as small integers, several in a word, are read as meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import weights
from models.checkpoint.files import INDEX, SINGLE, checkpoint_files
from models.checkpoint.unpacking import Unpacking
from models.packing import Packing, packing
from recipes.assembly.families import config_in
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import score
from tests.each_of import each_of
from tests.lazy import transformers
from tests.models.families import VARIANTS, expected_logprobs, make
from tests.models.packed_checkpoints import AWQ, FORMS, GPTQ, compressed, store
from tests.models.test_block_scales import fill
from tests.models.test_shared_weights import part_of

BY_NAME = {variant.name: variant for variant in VARIANTS}
COMPRESSED = compressed(4, "group", False)


def whole(form: Packing, shape: tuple[int, int], **found: Tensor) -> Tensor:
    return Unpacking(form, shape, slice(0, shape[0]), slice(0, shape[1]), (), torch.float32).weight(found)[0]


def test_what_autoawq_wrote_is_what_it_was_given() -> None:
    """By WQLinear_GEMM.from_linear, as AutoRound 0.16.1 has it from AutoAWQ."""
    found = whole(
        Packing("awq", 4, 2),
        (8, 4),
        qweight=torch.tensor([[-556812555], [-445003509], [584819212], [1153811480]], dtype=torch.int32),
        qzeros=torch.tensor([[1762262391], [-1755194905]], dtype=torch.int32),
        scales=torch.tensor(
            [
                [0.25, 0.625, 0.125, 0.75, 1.0, 0.25, 0.875, 0.5],
                [0.125, 0.25, 0.125, 0.5, 0.375, 0.125, 1.0, 0.875],
            ]
        ),
    )
    assert found.tolist() == [
        [-0.5, 1.0, 0.625, 0.125],
        [3.75, 0.0, 2.5, 1.0],
        [1.0, -0.875, -1.75, -1.625],
        [9.0, 5.25, 3.5, 3.0],
        [-7.0, -4.0, -2.625, -1.875],
        [1.25, -1.0, -0.625, -0.375],
        [-3.5, -2.625, -3.0, -1.0],
        [3.5, 4.0, -6.125, -4.375],
    ]


def test_what_autogptq_wrote_is_what_it_was_given() -> None:
    """By QuantLinear.pack of auto-gptq 0.7.1: two groups whose inputs are not in order, scales of one."""
    words = [
        [-1395792097, -324512161, 1770811009, 1540611978, -2131613979, -350486794, 1211555382, 184668833]
    ]
    found = whole(
        Packing("gptq", 4, 4, less_one=True, has_order=True),
        (8, 8),
        qweight=torch.tensor(words, dtype=torch.int32),
        qzeros=torch.tensor([[1136356375], [590808266]], dtype=torch.int32),
        scales=torch.ones(2, 8),
        g_idx=torch.tensor([1, 0, 0, 0, 1, 1, 0, 0], dtype=torch.int32),
    )
    assert found.int().tolist() == [
        [4, -7, -1, 6, 2, 1, 4, 2],
        [2, 3, 4, 3, -5, -3, 10, 12],
        [-4, -5, 1, -7, 7, 3, -4, -7],
        [9, 1, 8, 6, 2, 12, 4, -2],
        [-3, 2, -6, -10, -6, 7, -12, -4],
        [2, 3, 2, 3, 7, -3, -1, 2],
        [2, -1, 10, 9, 2, -1, 4, 0],
        [-2, 5, -3, 8, -2, -3, 6, -5],
    ]
    words = [[-1468591356, 1538547375, -1177658785, -1210054214]]
    found = whole(
        Packing("gptq", 8, 2, less_one=True, has_order=True),
        (4, 4),
        qweight=torch.tensor(words, dtype=torch.int32),
        qzeros=torch.tensor([[-180041325], [714129250]], dtype=torch.int32),
        scales=torch.ones(2, 4),
        g_idx=torch.tensor([1, 0, 0, 0], dtype=torch.int32),
    )
    assert found.int().tolist() == [
        [-95, -129, -29, 20],
        [-17, -108, -22, -111],
        [-50, 21, 137, 116],
        [143, -237, -22, -63],
    ]


def test_a_zero_of_nothing_borrows_from_the_one_above_it() -> None:
    """GPTQModel takes 0x11111111 from a word at once: 0x00000050 becomes 0xeeeeef3f."""
    found = whole(
        Packing("gptq", 4, 8, less_one=True),
        (8, 8),
        qweight=torch.zeros(1, 8, dtype=torch.int32),
        qzeros=torch.tensor([[0xEEEEEF3F - 2**32]], dtype=torch.int32),
        scales=torch.ones(1, 8),
    )
    assert found[:, 0].tolist() == [0, -5, 0, 0, 0, 0, 0, 0]


def test_what_compressed_tensors_packs_is_what_it_was_given() -> None:
    """By pack_to_int32 of compressed-tensors 0.20, of -8 to 7, outputs and inputs that fill no word."""
    numbers = [[-8, 7, 0, -1, 3, -5, 6, 2, 1, -2], [4, -3, 5, -7, -6, 0, 7, -8, 2, -4]]
    words = torch.tensor([[-1371834128, 105], [260185436, 74]], dtype=torch.int32)
    shape = torch.tensor([2, 10])
    found = whole(
        Packing("pack-quantized", 4, None, has_zeros=False),
        (2, 10),
        weight_packed=words,
        weight_scale=torch.ones(2, 1),
        weight_shape=shape,
    )
    assert found.int().tolist() == numbers
    zeros = [[-8, 3], [7, -1], [0, 5], [2, -6], [1, 1], [-4, 4], [6, -7], [-2, 0], [5, -5], [3, 2]]
    found = whole(
        Packing("pack-quantized", 4, 1),
        (10, 2),
        weight_packed=torch.full((10, 1), 0x88, dtype=torch.int32),
        weight_scale=torch.ones(10, 2),
        weight_zero_point=torch.tensor([[1850321136, -2117522053], [189, 163]], dtype=torch.int32),
        weight_shape=torch.tensor([10, 2]),
    )
    assert (-found.int()).tolist() == zeros
    found = whole(
        Packing("pack-quantized", 8, None, has_zeros=False),
        (1, 6),
        weight_packed=torch.tensor([[2139160320, 31619]], dtype=torch.int32),
        weight_scale=torch.ones(1, 1),
        weight_shape=torch.tensor([1, 6]),
    )
    assert found.int().tolist() == [[-128, 127, 0, -1, 3, -5]]


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Give the tensors of each file of a checkpoint other names, or values."""
    where: dict[str, str] = {}
    for file in checkpoint_files(path):
        tensors = change(load_file(file))
        save_file(tensors, file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
    (path / INDEX).write_text(json.dumps({"weight_map": where}))


def stored(name: str, form: str, tmp_path: Path) -> tuple[Any, Path]:
    """Transformers' model of what is stored, and the directory."""
    torch.manual_seed(0)
    model, path = make(replace(BY_NAME[name], shard_size="5GB"), tmp_path)
    fill(model, store(path, FORMS[form]))
    return model, path


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("llama_biased", form) for form in FORMS),
        *(("phi3", "awq"), ("phi3", "packed_zeros"), ("glm4", "gptq_by_activation")),  # stored joined
        *(("deepseek_v3_one_group", "awq"), ("deepseek_v3_one_group", "packed_zeros")),
    ],
)
def test_the_model_answers_as_with_the_numbers_that_are_stored(name: str, form: str, tmp_path: Path) -> None:
    assert_alike(*stored(name, form, tmp_path))


def test_a_shape_may_be_stored_in_32_bits(tmp_path: Path) -> None:
    """As it is in the files of Kimi-K2.5, of linears in 4 bits."""
    model, path = stored("llama", "packed", tmp_path)

    def narrowed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.int() if name.endswith("_shape") else each for name, each in tensors.items()}

    rewritten(path, narrowed)
    assert_alike(model, path)


def test_a_decoder_without_a_head_may_be_packed(tmp_path: Path) -> None:
    """As models for embeddings are saved, whose names lack model. at their beginning."""
    model, path = stored("qwen3", "packed_zeros", tmp_path)

    def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {each.removeprefix("model."): tensor for each, tensor in tensors.items()}
        assert made.keys().isdisjoint(tensors)
        return made

    rewritten(path, bare)
    assert_alike(model, path)


@pytest.mark.parametrize("said", ["layers.0.mlp.down_proj", r"re:layers\.0\.mlp\.down_", "re:.*0.mlp.down"])
def test_a_decoder_without_a_head_may_leave_linears_plain(said: str, tmp_path: Path) -> None:
    """They are named as its tensors are, and read as those of one with a head."""
    _, path = stored("qwen3", "packed_zeros", tmp_path)
    rewritten(path, lambda tensors: {each.removeprefix("model."): one for each, one in tensors.items()})
    hf = json.loads((path / "config.json").read_text())
    hf["quantization_config"]["ignore"] = ["lm_head", said]
    (path / "config.json").write_text(json.dumps(hf))
    form = config_in(path).stored_form
    assert isinstance(form, Packing)
    assert not form.covers("model.layers.0.mlp.down_proj")
    assert form.covers("model.layers.1.mlp.down_proj")
    assert form.covers("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("form", ["awq", "gptq_8_bits", "gptq_by_activation"])
def test_a_file_beside_config_json_may_describe_how_weights_are_packed(form: str, tmp_path: Path) -> None:
    """AutoGPTQ and older versions of AutoAWQ write such a file, and leave config.json as it was."""
    model, path = stored("llama", form, tmp_path)
    hf = json.loads((path / "config.json").read_text())
    said = hf.pop("quantization_config")
    del said["quant_method"]
    name = "quantize_config.json"
    if form == "awq":
        name = "quant_config.json"
        said = {"zero_point": True, "q_group_size": said["group_size"], "w_bit": 4, "version": "GEMM"}
    (path / "config.json").write_text(json.dumps(hf))
    (path / name).write_text(json.dumps(said))
    assert_alike(model, path)
    tensors = {}
    for file in checkpoint_files(path):
        tensors |= load_file(file)
        file.unlink()
    (path / INDEX).unlink()
    save_file(tensors, path / (SINGLE if form == "awq" else "gptq_model-4bit-16g.safetensors"))
    assert_alike(model, path)
    (path / name).write_text(json.dumps(said | {"bits": 3, "w_bit": 3}))
    with pytest.raises(
        ValueError, match=rf"\(quantization_config stands in {name}\): .*\.bits: 3; of .* are read"
    ):
        config_in(path)


def test_a_file_that_describes_packed_weights_says_nothing_of_plain_ones(tmp_path: Path) -> None:
    model, path = make(BY_NAME["llama"], tmp_path)
    (path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert config_in(path).stored_form is None
    assert_alike(model, path)


def test_a_description_of_nvidias_is_named(tmp_path: Path) -> None:
    """Model Optimizer describes 8-bit floats beside config.json, in a form that is not read."""
    path = make(BY_NAME["llama"], tmp_path)[1]
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert config_in(path).quantization is None  # the file says nothing beside plain weights
    file = checkpoint_files(path)[0]
    scale = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
    save_file(load_file(file) | scale, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"stands in hf_quant_config\.json\): .*quant_method: 'modelopt'"):
        config_in(path)


def assert_alike(model: Any, path: Path) -> None:
    tokens = torch.arange(3, 60).tolist()
    expected = expected_logprobs(model, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [tokens]).logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["awq", "gptq_by_activation", "gptq_8_bits", "packed_zeros"])
def test_each_rank_makes_its_part(form: str, tmp_path: Path) -> None:
    """Groups of 16 inputs, of which a quarter of 80 cuts some, and words of 8 outputs, which 6 rows of a head
    cut, too.
    """
    _, path = stored("llama_biased", form, tmp_path)
    config, layers = config_in(path), []
    for size in (1, 4):
        decoders = [part_of(config, rank, size) for rank in range(size)]
        for decoder in decoders:
            decoder.pack = lambda: None
            weights.load(decoder, path)
        layers.append([decoder.layers[1] for decoder in decoders])
    (one,), four = layers
    assert torch.equal(torch.cat([each.mlp.down.weight for each in four], 1), one.mlp.down.weight)
    assert torch.equal(
        torch.cat([each.attention.output.weight for each in four], 1), one.attention.output.weight
    )
    ups = [each.mlp.gate_up.weight.chunk(2)[1] for each in four]
    assert torch.equal(torch.cat(ups), one.mlp.gate_up.weight.chunk(2)[1])
    queries = [each.attention.qkv.weight[:12] for each in four]
    assert torch.equal(torch.cat(queries), one.attention.qkv.weight[:48])


@each_of(
    "said, is_less",
    [
        ({}, True),
        ({"format": "gptq"}, True),
        ({"format": "GPTQ_v2"}, False),
        ({"checkpoint_format": "GPTQ_V2"}, False),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, False),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, True),
    ],
)
def test_zeros_of_gptq_are_less_one_but_in_version_2_by_either_name(
    said: dict[str, str], is_less: bool
) -> None:
    """As transformers' GPTQConfig reads it."""
    theirs = transformers.GPTQConfig(**{"bits": 4} | said)
    found = packing({"quantization_config": GPTQ | said})
    assert found is not None
    assert found.less_one == is_less == (theirs.format == "gptq")


@each_of(
    "said, words",
    [
        (AWQ | {"version": "gemv"}, "version: 'gemv'; of awq the version gemm"),
        (AWQ | {"bits": 3}, "bits: 3; of awq 4 bits"),
        (AWQ | {"zero_point": False}, "zero_point: False"),
        (AWQ | {"group_size": 0}, "group_size: 0; it must be -1, or from 1"),
        (GPTQ | {"bits": 2}, "bits: 2; of gptq 4 and 8 bits"),
        (GPTQ | {"bits": 3}, "bits: 3; of gptq 4 and 8 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"format": "marlin"}, "format: 'marlin'; gptq and gptq_v2 are read"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype: 'int16'"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic: "),
        (GPTQ | {"desc_act": "yes"}, "desc_act: 'yes'"),
        (compressed(4, "tensor", True), "weights.strategy: 'tensor'; read are group, channel"),
        (compressed(3, "group", True), "weights.num_bits: 3"),
        (compressed(4, "group", True, actorder="x"), "weights.actorder: 'x'"),
        (compressed(4, "group", True, group_size=None), "group_size: None"),
        (COMPRESSED | {"config_groups": {}}, "config_groups: {}; one group is read"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_another_form_is_refused_by_its_name(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_config.{words}") as caught:
        packing({"quantization_config": said})
    assert "\n" not in str(caught.value)


def test_gptq_names_what_is_left_out_and_what_nothing_is_changed_of() -> None:
    """As in Qwen's own checkpoints of Qwen3.5."""
    dynamic = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}}
    found = packing({"quantization_config": GPTQ | {"dynamic": dynamic}})
    assert found is not None
    assert found.covers("model.layers.0.mlp.up_proj")
    assert not found.covers("model.layers.0.self_attn.q_proj")


def test_both_names_of_an_order_by_activation_say_that_inputs_are_moved() -> None:
    orders = {name: compressed(4, "group", True, actorder=name) for name in ("group", "dynamic", "static")}
    found = {name: packing({"quantization_config": said}) for name, said in orders.items()}
    assert [name for name, each in found.items() if each is not None and each.has_order] == [
        "group",
        "dynamic",
    ]


def test_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    _, path = stored("llama_biased", "gptq_by_activation", tmp_path)
    prefix, file = "model.layers.0.self_attn.", path / "model-0.safetensors"
    tensors = load_file(file)
    del tensors[f"{prefix}o_proj.g_idx"]
    tensors[f"{prefix}v_proj.scales"] = torch.ones(3, 25)
    tensors[f"{prefix}q_proj.qweight"] = tensors[f"{prefix}q_proj.qweight"].long()
    save_file(tensors, file)
    with pytest.raises(ValueError, match="are not those of") as caught:
        score(path, [[3, 4, 5]])
    for words in (
        f"missing: {prefix}o_proj.g_idx [48]",
        f"misshapen: {prefix}v_proj.scales is [3, 25], the model needs [3, 24]",
        f"wrongly typed: {prefix}q_proj.qweight is I64, not one of I32",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("end", "value", "words"),
    [
        ("g_idx", 9, "g_idx names groups from 9 to 9, and there are 8"),
        ("scales", torch.nan, "holds NaN or infinity"),
    ],
)
def test_a_damaged_tensor_is_named(end: str, value: float, words: str, tmp_path: Path) -> None:
    _, path = stored("qwen3", "gptq", tmp_path)
    name = f"model.layers.0.self_attn.o_proj.{end}"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: torch.full_like(tensors[name], value)}, file)
    with pytest.raises(ValueError, match=f"is damaged: model.layers.0.self_attn.o_proj.*{words}"):
        score(path, [[3, 4, 5]])


def test_a_bias_of_nothing_is_passed_over_and_another_refused(tmp_path: Path) -> None:
    """The first packages for GPTQ wrote one for each linear."""
    _, path = stored("qwen3", "gptq", tmp_path)
    file = path / "model-0.safetensors"
    tensors = load_file(file)
    stem = next(name for name in tensors if name.endswith("down_proj.qweight")).removesuffix(".qweight")
    save_file(tensors | {f"{stem}.bias": torch.zeros(48)}, file)
    score(path, [[3, 4, 5]])
    save_file(tensors | {f"{stem}.bias": torch.ones(48)}, file)
    with pytest.raises(ValueError, match=f"{stem}.weight: it has a bias beside it that is not zero"):
        score(path, [[3, 4, 5]])


def test_it_is_not_quantised_twice_on_disk(tmp_path: Path) -> None:
    _, path = stored("qwen3", "awq", tmp_path)
    with pytest.raises(ValueError, match=r"is packed \(awq of 4 bits by 16 inputs\); set"):
        quantize(path, tmp_path / "int8")


@each_of(
    "left_out",
    [
        *([], ["gate"], ["mlp.gate"], ["gate_proj"], ["model.layers.1"], ["layers.1"], ["model.layers.1."]),
        *(["model.layers.*.self_attn"], ["model.layers.*.mlp.gate"], ["model.layers.1|model.layers.11"]),
        *(
            ["down_proj", "model.layers.11.mlp"],
            ["model"],
            [""],
            ["model.layers.[01].mlp", "experts.1.up_proj"],
            ["self_attn", "experts.1", "mlp.gate", "lm_head"],
            [".*layers.*mlp.*gate.*"],
        ),
    ],
)
def test_awq_leaves_out_what_transformers_leaves_out_and_whole_parts_of_names(left_out: list[str]) -> None:
    """AutoAWQ, which makes the files, finds an entry anywhere in a name."""
    theirs = transformers.quantizers.quantizers_utils
    roles = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.down_proj"]
    roles += [f"mlp.experts.{number}.{name}_proj" for number in (1, 11) for name in ("gate", "up", "down")]
    found = packing({"quantization_config": AWQ | {"modules_to_not_convert": left_out}})
    assert found is not None
    for name in (f"model.layers.{layer}.{role}" for layer in (0, 1, 11) for role in roles):
        is_part = any(f".{each.strip('.')}." in name for each in left_out if each)
        assert found.covers(name) == (theirs.should_convert_module(name, left_out) and not is_part), name
    assert not found.covers("lm_head"), "it is not in a layer"


@pytest.mark.parametrize("wrong", [["(gate"], ["(a+)+b"], [3], "gate"])
def test_what_awq_leaves_out_is_checked(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"quantization_config\.modules_to_not_convert: "):
        packing({"quantization_config": AWQ | {"modules_to_not_convert": wrong}})
