"""Weights that a checkpoint stores in 8-bit floats, with a scale for each block, are read as meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.latent import LatentAttention
from models.checkpoint import weights
from models.checkpoint.files import INDEX, SINGLE
from models.checkpoint.unpacking import SUFFIX, scaled
from models.config import DecoderConfig
from models.decoder import Decoder
from models.ops.reference import Ops
from models.parallel.share import Share
from models.quantization import BlockScales, Quantization
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import score
from tests.models.families import VARIANTS, expected_logprobs, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.state_steps import empty_decoder
from tests.models.test_shared_weights import Rank

BLOCKS = BlockScales(16, 32)  # these sizes divide no weight
SAID = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCKS.rows, BLOCKS.columns],
}


def stored(path: Path) -> dict[str, Tensor]:
    """Store a checkpoint's linears so, all scales in a file of their own; what they stand for, by name."""
    tensors, scales, exact = load_file(path / SINGLE), {}, {}
    for name, weight in tensors.items():
        is_linear = name.endswith(("_proj.weight", "_proj_qkv.weight"))
        exact[name] = weight
        if is_linear:
            rows, columns = BLOCKS.shape(tuple(weight.shape))
            found = torch.rand(rows, columns) + 0.5
            small = (weight / scaled(torch.ones_like(weight), found, BLOCKS)).to(torch.float8_e4m3fn)
            tensors[name], scales[name + SUFFIX] = small, found
            exact[name] = scaled(small, found, BLOCKS)
    names = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    for file, some in names.items():
        save_file(some, path / file)
    (path / SINGLE).unlink()
    where = {name: file for file, some in names.items() for name in some}
    (path / INDEX).write_text(json.dumps({"weight_map": where}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": SAID}))
    return exact


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Any, Path]:
    """Transformers' model of what is stored, and the directory."""
    variant = next(each for each in VARIANTS if each.name == "deepseek_v3_one_group")
    model, path = make(variant, tmp_path)
    fill(model, stored(path))
    return model, path


def fill(model: Any, exact: dict[str, Tensor]) -> None:
    """Give transformers' model the numbers that a checkpoint's tensors stand for."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in exact.items():
            if name in named:
                named[name].copy_(weight)
            elif ".experts." in name:  # which transformers joins
                _, _, expert, role, _ = name.rsplit(".", 4)
                role = OF_MIXTRAL.get(role, role)
                block = name.split(".experts.")[0].replace("block_sparse_moe", "mlp")
                joined = named[f"{block}.experts.{JOINED[role]}"]
                half = joined.shape[1] // 2
                rows = {"gate_proj": slice(half), "up_proj": slice(half, None)}.get(role, slice(None))
                joined[int(expert), rows] = weight


OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
JOINED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def test_a_scale_belongs_to_its_block() -> None:
    weight, scales = torch.ones(40, 70), torch.arange(9.0).view(3, 3)
    whole = scaled(weight, scales, BLOCKS)
    assert [whole[at].item() for at in ((0, 0), (15, 31), (16, 31), (15, 32), (39, 69))] == [0, 0, 3, 1, 8]
    assert torch.equal(scaled(weight[20:30, 30:], scales, BLOCKS, (20, 30)), whole[20:30, 30:])


def test_the_model_answers_as_with_the_numbers_that_are_stored(checkpoint: tuple[Any, Path]) -> None:
    model, path = checkpoint
    tokens = torch.arange(3, 60).tolist()
    expected = expected_logprobs(model, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [tokens]).logprobs, expected, rtol=0, atol=1e-4)


def test_each_rank_scales_its_part(checkpoint: tuple[Any, Path]) -> None:
    _, path = checkpoint
    config = config_in(path)
    whole = loaded(path, Share())
    for rank in range(2):
        part = loaded(path, Share(rank, 2))
        down, own = (each.layers[0].mlp.shared.down.weight for each in (whole, part))
        half = config.shared_size // 2
        assert torch.equal(own, down[:, rank * half : (rank + 1) * half])


def test_each_rank_scales_its_ranges(tmp_path: Path) -> None:
    """Of Qwen3.5's joined queries, keys and values, each rank has those of its heads."""
    (variant,) = (each for each in RECURRENT_VARIANTS if each.name == "qwen3_5")
    _, path = make(variant, tmp_path)
    stored(path)
    joined = [qkv_of(path, rank, size) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert_ranges(config_in(path), *joined)


def qkv_of(path: Path, rank: int, size: int, quantization: Quantization | None = None) -> Tensor:
    """What a rank holds of the queries, keys, values and gates of the first layer, which keeps a state."""
    decoder = empty_decoder(path, group=Rank(rank, size), quantization=quantization)
    decoder.pack = lambda: None
    weights.load(decoder, path)
    found: Tensor = decoder.layers[0].attention.qkvz.weight
    return found


def assert_ranges(config: DecoderConfig, whole: Tensor, *parts: Tensor) -> None:
    """Each part has its ranges of the whole's queries, keys and values, and its part of the gates."""
    assert config.recurrent is not None
    gates = whole[config.recurrent.num_channels :].chunk(len(parts))
    for rank, part in enumerate(parts):
        ranges = Share(rank, len(parts)).ranges("model.layers.0.linear_attn.in_proj_qkv", config)
        assert len(ranges) == 3
        assert torch.equal(part, torch.cat([*(whole[each] for each in ranges), gates[rank]]))


def loaded(path: Path, share: Share) -> Decoder:
    config = config_in(path)
    group = Rank(share.tensor, share.tensors)
    decoder = Decoder(config, Ops(), LatentAttention(shape_of(16, share.part(config))), group)
    decoder.pack = lambda: None
    weights.load(decoder, path)
    return decoder


def test_it_can_be_stored_in_int8(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    """But for the up-projections of latents, which are multiplied in the model's type."""
    _, path = checkpoint
    quantize(path, tmp_path / "int8")
    made = {}
    for file in (tmp_path / "int8").glob("*.safetensors"):
        made |= load_file(file)
    assert not [name for name in made if name.endswith(SUFFIX)]
    assert not [name for name, each in made.items() if each.dtype == torch.float8_e4m3fn]
    types = {name.split(".")[-2]: each.dtype for name, each in made.items() if name.endswith("_proj.weight")}
    assert types.pop("kv_b_proj") == torch.float32
    assert set(types.values()) == {torch.int8}
    tokens = list(range(3, 60))
    assert score(path, [tokens]).distance(score(tmp_path / "int8", [tokens])) < 0.3
    assert config_in(tmp_path / "int8").stored_form is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_block_size": None}, "weight_block_size: None; of 8-bit floats a scale"),
        ({"weight_block_size": [128]}, r"weight_block_size: \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size: \[128, 0\]"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2'; of 8-bit floats it must be e4m3"),
    ],
)
def test_another_form_is_refused(checkpoint: tuple[Any, Path], change: dict[str, Any], said: str) -> None:
    _, path = checkpoint
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": SAID | change}))
    with pytest.raises(ValueError, match=said):
        config_in(path)


def test_a_scale_that_is_missing_is_named(checkpoint: tuple[Any, Path]) -> None:
    _, path = checkpoint
    file = path / "model-00002-of-00002.safetensors"
    scales = load_file(file)
    name = next(iter(scales))
    del scales[name]
    save_file(scales, file)
    with pytest.raises(ValueError, match=f"missing: {name}"):
        score(path, [[3, 4, 5]])
    with pytest.raises(ValueError, match=f"lacks {name}"):
        quantize(path, path.parent / "int8")


@pytest.mark.parametrize(
    ("blocks", "surplus", "dtype"),
    [
        ([32, 64], 0, torch.float32),
        ([8, 16], 0, torch.float32),
        ([16, 32], 1, torch.float32),
        ([16, 32], 0, torch.int32),
    ],
)
def test_scales_of_other_blocks_are_not_applied(
    blocks: list[int], surplus: int, dtype: torch.dtype, checkpoint: tuple[Any, Path]
) -> None:
    """They would make other numbers, or end in the middle of a weight."""
    _, path = checkpoint
    file, config = path / "model-00002-of-00002.safetensors", json.loads((path / "config.json").read_text())
    changed = {name: torch.cat([each[:surplus], each]).to(dtype) for name, each in load_file(file).items()}
    save_file(changed, file)
    said = {"quantization_config": SAID | {"weight_block_size": blocks}}
    (path / "config.json").write_text(json.dumps(config | said))
    words = rf"{SUFFIX} is {str(dtype)[6:]} .* in 8-bit floats by blocks of {blocks[0]} x .* takes floats \["
    with pytest.raises(ValueError, match=words):
        quantize(path, path.parent / "int8")
    assert not (path.parent / "int8").exists()


def test_scales_in_two_files_are_not_chosen_from(checkpoint: tuple[Any, Path]) -> None:
    _, path = checkpoint
    first, second = (path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    name, scales = next(iter(load_file(second).items()))
    save_file(load_file(first) | {name: 3 * scales}, first)
    with pytest.raises(ValueError, match=f"has {name} in two files; download it again"):
        quantize(path, path.parent / "int8")
