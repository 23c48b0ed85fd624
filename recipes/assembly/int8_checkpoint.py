"""Write an int8 version of a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from devices.int8 import quantize_rows
from devices.shapes import dtype_name
from models.checkpoint.destination import check_finite
from models.checkpoint.files import (
    INDEX,
    checkpoint_files,
    names_in,
    open_checkpoint,
    saving,
    stored_names,
)
from models.checkpoint.stacked_experts import STACKS
from models.checkpoint.unpacking import SUFFIX, scaled
from models.checkpoint_names import TOWERS
from models.config import DecoderConfig
from models.drafting.config import mtp_config
from models.layers.dtypes import TORCH_DTYPES
from models.packing import Packing
from models.quantization import KEY, BlockScales, Quantization
from recipes.assembly.families import config_in

# These belong to latent attention, which multiplies with them in the model's type.
UP_PROJECTIONS = r"re:.*\.kv_b_proj$"
# Readers of the checkpoint see them as linears, and they are too small to gain from int8.
ROUTERS = r"re:.*(\.gate|\.wg|shared_expert_gate)$"
# How the parts for images are named, wherever a reader has them
_TOWER = "|".join(dict.fromkeys(each.removeprefix("model.").removesuffix(".") for each in TOWERS))
# The head and the parts for images of models that read these, too, by whatever names readers know them
BESIDE_A_TEXT = (r"re:.*lm_head$", rf"re:.*({_TOWER})\.")
# How tensors of all experts end, which files of some families may have
STACKED = tuple(f".experts.{end}" for end in STACKS)
# Types of numbers that stand for themselves, as the loader takes them
FLOATING = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Weight files of any format, which are not copied.
LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def quantize(source: Path, target: Path) -> tuple[int, int]:
    """Write the quantised checkpoint, and return the bytes of all weights before and after.

    `target` appears whole or not at all. Raises ValueError for a target that is not empty, and for a source
    that is quantised or not supported.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there and not empty; name a new directory")
    config = config_in(source)
    if config.quantization is not None:
        raise ValueError(f"{source} is quantised already; name the original checkpoint")
    if isinstance(config.stored_form, Packing):
        raise ValueError(f"{source} is packed ({config.stored_form}); set model.quantization: w8a8 instead")
    if config.stored_joined:
        joined = " and ".join(config.stored_joined)
        raise ValueError(f"{source} stores linears joined ({joined}); set model.quantization: w8a8 instead")
    files = checkpoint_files(source)
    stored = Counter(name for file in files for name in names_in(open_checkpoint(file, "numpy")))
    if config.mixture is not None and (
        config.mixture.is_stacked or any(name.endswith(STACKED) for name in stored)
    ):
        raise ValueError(f"{source} stores experts joined; set model.quantization: w8a8 instead")
    ignore = ["lm_head"]
    if config.reads_text_alone:
        ignore = [*BESIDE_A_TEXT]
    if config.mixture is not None:
        ignore.append(ROUTERS)
    if config.latent is not None:
        ignore.append(UP_PROJECTIONS)
    scheme = Quantization(tuple(ignore))
    names = {f"{name}.weight" for name, *_ in config.linears() if scheme.covers(name)}
    further = set()  # weights of a prediction layer behind the model's own layers, which may be absent
    if config.num_unread_layers:
        further = {f"{name}.weight" for name, *_ in mtp_config(config, 1).linears() if scheme.covers(name)}
    if absent := sorted(names - stored.keys()):
        raise ValueError(f"{source} lacks {', '.join(absent[:3])}{' ...' * (len(absent) > 3)}")
    if twice := next((name for name, count in stored.items() if count > 1), None):
        raise ValueError(f"{source} has {twice} in two files; download it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as room:
        made = Path(room) / target.name
        made.mkdir()
        places: dict[str, str] = {}
        sizes = {"before": 0, "after": 0}
        for file in files:
            tensors = dict(_quantized(file, names | further, sizes, config, files))
            with saving(target):
                save_file(tensors, made / file.name, metadata={"format": "pt"})
            shutil.copymode(file, made / file.name)
            places |= dict.fromkeys(tensors, file.name)
            del tensors
        if (source / INDEX).is_file():
            index = {"metadata": {"total_size": sizes["after"]}, "weight_map": places}
            (made / INDEX).write_text(json.dumps(index, indent=2))
        _copy_the_rest(source, made, scheme)
        if target.exists():
            target.rmdir()
        os.replace(made, target)
    return sizes["before"], sizes["after"]


def _quantized(
    file: Path, names: set[str], sizes: dict[str, int], config: DecoderConfig, files: list[Path]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file as they are to be written, under the names that the file gives them.

    Scales of 8-bit floats are applied and dropped. Raises ValueError for numbers that config.json does not
    describe.
    """
    opened = open_checkpoint(file)
    for name, stored in stored_names(opened).items():
        tensor = opened.get_tensor(name)
        sizes["before"] += tensor.nbytes
        if isinstance(config.stored_form, BlockScales) and name.endswith(SUFFIX):
            continue
        if isinstance(config.stored_form, BlockScales) and tensor.dtype == torch.float8_e4m3fn:
            scales = _found(name + SUFFIX, [file, *files])
            _check_scales(file, name, tensor, scales, config.stored_form)
            tensor = scaled(tensor, scales, config.stored_form).to(TORCH_DTYPES[config.dtype])
        if tensor.dtype not in FLOATING and (name in names or tensor.is_floating_point()):
            raise ValueError(
                f"{file}: {name} is {dtype_name(tensor.dtype)}, and config.json says nothing of such numbers;"
                " download it again, or correct config.json"
            )
        check_finite(file, name, tensor, tensor.dtype)
        made = {stored: tensor}
        if name in names:
            weight, scale = quantize_rows(tensor)
            made = {stored: weight, f"{stored}_scale": scale}
        sizes["after"] += sum(each.nbytes for each in made.values())
        yield from made.items()


def _found(name: str, files: list[Path]) -> Tensor:
    """Return a tensor that is in one of these files, usually in the first."""
    for file in files:
        opened = open_checkpoint(file)
        if name in names_in(opened):
            found: Tensor = opened.get_tensor(name)
            return found
    raise ValueError(f"{files[0].parent} lacks {name}; download it again")


def _check_scales(file: Path, name: str, weight: Tensor, scales: Tensor, blocks: BlockScales) -> None:
    """Raise ValueError unless there is a scale for each block: others would make other numbers silently."""
    shape = tuple(weight.shape)
    wanted = blocks.shape(shape) if len(shape) == 2 else ()
    if tuple(scales.shape) != wanted or scales.dtype not in FLOATING:
        raise ValueError(
            f"{file.parent}: {name}{SUFFIX} is {dtype_name(scales.dtype)} {[*scales.shape]}, and {[*shape]}"
            f" in {blocks} takes floats {[*wanted]}; download it again, or correct config.json"
        )


def _copy_the_rest(source: Path, target: Path, scheme: Quantization) -> None:
    """Copy tokenizer, chat template and the other files beside the weights; config.json names the scheme."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in LEFT_OUT and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    said = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(said | {KEY: scheme.in_json()}, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
