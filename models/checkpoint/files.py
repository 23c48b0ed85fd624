"""List the safetensors files of a checkpoint directory, open them, and name their tensors.

Checkpoints are Hugging Face directories of safetensors, one file or an index over shards. Where the tensors
go is the task of `weights`. torch is imported only when a tensor is read.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from borders.files import check_regular, is_there
from kv_cache.groups import DType
from models.checkpoint_names import BODY, alone
from models.modelslim import description_in

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d{1,6})-of-(\d{1,6})\.safetensors")
_LFS = b"version https://git-lfs"  # the first bytes of a pointer, where Git LFS has not fetched the file
GPTQ_FILES = "gptq_model-*.safetensors"  # AutoGPTQ's name of a single file, with bits and group
MISTRALS = "consolidated*.safetensors"  # names of Mistral's own format, whose tensors have other names, too
QUANTISED = "quant_model_weight*.safetensors"  # names of msModelSlim, beside which there may be an index
MOST_INDEX_BYTES = 2**28  # an entry for each tensor of 256 quantised experts in 61 layers has 24 MiB
MOST_NAMES = 20  # names that one message lists
# Types of tensors, as safetensors names them, in which a model may be computed
_OF_MODELS: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint directory; raises ValueError if some are absent."""
    single, index, quantised = path / SINGLE, path / INDEX, _quantised(path)
    if quantised is not None and quantised.suffix == ".json":
        index = quantised
    elif quantised is not None or single.is_file():
        return [quantised or single]
    if not is_there(index) and (file := description_in(path)) is not None:
        raise ValueError(
            f"{path} holds {file.name}, and none of the weights that it describes ({QUANTISED}, or {SINGLE}):"
            " copy them into the same folder"
        )
    if not is_there(index):
        if is_there(single):
            raise ValueError(f"{single} is a link that leads to no file; download it again")
        if shards := _numbered(path):
            return shards
        if len(named := sorted(path.glob(GPTQ_FILES))) == 1:
            return named
        if mistrals := sorted(path.glob(MISTRALS)):
            raise mistrals_own(mistrals[0])
        raise ValueError(
            f"{path} holds neither {SINGLE} nor {INDEX}; only safetensors are read: "
            "convert the checkpoint, or set model.weights: random"
        )
    check_regular(index, MOST_INDEX_BYTES)
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        names = sorted(Path(file).name for file in files)  # all in this folder, whatever the index says
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors files; download it again") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} lacks {_first(absent)}, which {index.name} lists; download what is missing")
    return [path / name for name in names]


def mistrals_own(file: Path) -> ValueError:
    """Return the refusal of weights in Mistral's own format."""
    return ValueError(
        f"{file} is in Mistral's own format, which is not read; take config.json and {SINGLE}, or {INDEX}"
        " with its shards, of the same model: hf download ORG/NAME --exclude 'consolidated*'"
    )


def _numbered(path: Path) -> list[Path]:
    """Return the shards of a checkpoint without an index, which their names count; empty if there are none.

    Raises ValueError if some are absent, or if they are of several checkpoints.
    """
    matches = [match for each in sorted(path.iterdir()) if (match := _SHARD.fullmatch(each.name))]
    if not matches:
        return []
    found, count = {int(match[1]): match for match in matches}, int(matches[0][2])
    if len(found) != len(matches) or any(int(match[2]) != count for match in matches):
        listed = _first([match.string for match in matches])
        raise ValueError(f"{path} lacks {INDEX} and holds {listed}: keep the shards of one checkpoint")
    absent = [f"{number} of {count}" for number in range(1, count + 1) if number not in found]
    if absent:
        raise ValueError(f"{path} lacks {INDEX} and shards {_first(absent)}; download what is missing")
    return [path / found[number].string for number in sorted(found)]


def _quantised(path: Path) -> Path | None:
    """Return the one file, or the index of several, that msModelSlim wrote into a directory; None if none.

    An index counts before a single file, because each of its parts has such a name too. Beside a description,
    weights may have any name.
    """
    patterns = [f"{QUANTISED}.index.json", QUANTISED]
    has_names = is_there(path / SINGLE) or is_there(path / INDEX)
    if not has_names and description_in(path) is not None:
        patterns += ["*.safetensors.index.json", "*.safetensors"]
    for pattern in patterns:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            listed = _first([each.name for each in found])
            raise ValueError(f"{path} holds {listed}: keep those of one export, with their one index")
        if found:
            return found[0]
    return None


def tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint; raises ValueError if files are absent or damaged."""
    opened = (open_checkpoint(file, "numpy") for file in checkpoint_files(path))
    return {name for file in opened for name in names_in(file)}


def is_body(path: Path) -> bool:
    """Whether a checkpoint is a decoder that was saved without its head; raises ValueError as `tensor_names`.

    A file that says model. before its names, as those with a head do, tells at once that it is not.
    """
    has_embedding = False
    for file in checkpoint_files(path):
        names = stored_names(open_checkpoint(file, "numpy")).values()
        if any(name.startswith(("model.", "language_model.", "lm_head.")) for name in names):
            return False
        has_embedding = has_embedding or f"{BODY[0]}weight" in names
    return has_embedding


def first_dtype(path: Path) -> DType | None:
    """Return the type of the first tensor that has one of a model, or None; raises ValueError likewise.

    So transformers' dtype="auto" takes it. Types in which weights are quantised are passed over.
    """
    for file in checkpoint_files(path):
        opened = open_checkpoint(file, "numpy")
        for name in names_in(opened):
            if (dtype := _OF_MODELS.get(opened.get_slice(name).get_dtype())) is not None:
                return dtype
    return None


def _first(names: list[str]) -> str:
    """List the first of many names, so that a message stays readable."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMES]) + more


def open_checkpoint(file: Path, framework: Literal["pt", "numpy"] = "pt") -> Any:
    """Map a safetensors file, whose tensors are those of `framework`.

    Tensors of a text model within another are named as if they were alone, and those of one without its head
    as if it had one. Raises ValueError if the file is damaged or something else, or if it has a tensor under
    both names.
    """
    _check_fetched(file)
    try:
        opened = safe_open(str(file), framework=framework, device="cpu")
        stored: dict[str, str] = {}
        for name in names_in(opened):
            if (other := stored.setdefault(alone(name), name)) != name:
                raise ValueError(f"{file} has both {other[:100]} and {name[:100]}; download it again")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); download it again") from error
    return opened if all(map(str.__eq__, stored, stored.values())) else TextTensors(opened, stored)


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Make what safetensors says of a full disk, or of a limit, an OSError that names what is written."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}; free some space, or write elsewhere") from error


class TextTensors:
    """A mapped file whose tensors have other names there."""

    def __init__(self, opened: Any, stored: dict[str, str]) -> None:
        self._opened, self.stored = opened, stored

    def keys(self) -> list[str]:
        """Return the names as if the text model were alone."""
        return list(self.stored)

    def get_tensor(self, name: str) -> Any:
        """Read a whole tensor."""
        return self._opened.get_tensor(self.stored[name])

    def get_slice(self, name: str) -> Any:
        """Return a tensor's header, by which parts of it are read."""
        return self._opened.get_slice(self.stored[name])

    def metadata(self) -> Any:
        """Return what the file says of itself."""
        return self._opened.metadata()


def _check_fetched(file: Path) -> None:
    """Raise ValueError for a pointer of Git LFS, and OSError for a file that may not be read.

    safetensors would call the one damaged, and say of the other that it is not there.
    """
    with file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            raise ValueError(f"{file} is Git LFS's pointer to the file: git lfs pull, or download it again")


def names_in(opened: Any) -> list[str]:
    """Return the tensor names of a file from `open_checkpoint`, which is no mapping."""
    return list(opened.keys())


def stored_names(opened: Any) -> dict[str, str]:
    """Return how a file from `open_checkpoint` itself calls each of its tensors."""
    return opened.stored if isinstance(opened, TextTensors) else {name: name for name in names_in(opened)}
