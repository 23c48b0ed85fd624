"""Describe which linears are multiplied in 8 bits, and read how a checkpoint says so.

W8A8 means int8 weights with a scale for each output channel and activations quantised token by token at run
time, both symmetric. A checkpoint has the layout of compressed-tensors, format int-quantized: `X.weight` int8
[out, in] and `X.weight_scale` [out, 1] in place of `X.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from borders.numbers import integers
from borders.refusal import abbreviate
from models.checkpoint_names import stored_spellings

# A linear is stored in the model's type; in int8 beside a scale for each output; in the model's type, and in
# int8 from loading on; in int8 with one scale for all of its inputs, too; in 4 bits beside a scale for each
# output, to be multiplied with int8; or in int8 beside such a scale, to be multiplied in the model's type
Stored = Literal["plain", "int8", "quantize", "static", "w4a8", "w8a16"]
KEY = "quantization_config"
FLOATS = "fp8"  # the method of 8-bit floats
PACKED, PACKED_FORMAT = (
    ("awq", "gptq", "mxfp4"),
    "pack-quantized",
)  # the methods, and a format, of models/packing.py
MXFP4_BLOCK = 32  # inputs that share a scale in mxfp4
MOST_BLOCK = 2**16
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
MOST_IGNORED = 2**14  # names or patterns of linears that are left unquantised
# A pattern comes from a downloaded file. Repeated groups take exponential time on names that they do not
# match, and each further repeat adds another power of the name's length
REPEATED_GROUP, REPEAT, MOST_REPEATS, MOST_PATTERN = re.compile(r"\)[*+{]"), re.compile(r"[*+{]"), 4, 256
FIX = (
    "use the original checkpoint with model.quantization: w8a8, or quantise it by python -m scripts.quantize"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """W8A8 for all linears except those that `ignore` names: whole names, or `re:` and how a name begins."""

    ignore: tuple[str, ...] = ("lm_head",)
    is_stored: bool = True  # quantised by the checkpoint; otherwise quantised when it is loaded

    def covers(self, name: str) -> bool:
        """Whether a checkpoint's linear, such as `model.layers.0.mlp.down_proj`, is quantised."""
        return covers(name, self.ignore)

    @property
    def int8_forms(self) -> frozenset[Stored]:
        """The forms of linears in int8."""
        return frozenset({"int8"})

    def __str__(self) -> str:
        return "W8A8"

    def form(self, name: str) -> Stored:
        """Return how a checkpoint's linear is held."""
        if not self.covers(name):
            return "plain"
        return "int8" if self.is_stored else "quantize"

    def has_norm_bias(self, name: str) -> bool:
        """Whether the quantisation moved a part of what the norm of this name computes into a bias."""
        return False

    def has_cache_scales(self, name: str) -> bool:
        """Whether the attention of this name has scales for the channels of its keys and values."""
        return False

    def in_json(self) -> dict[str, Any]:
        """Return what config.json says of a checkpoint in this form."""
        group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
        }


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The rows and columns of a weight that share a scale, if a checkpoint stores it in 8-bit floats."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"8-bit floats by blocks of {self.rows} x {self.columns}"

    def shape(self, weight: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [out, in]."""
        outputs, inputs = weight
        return -(-outputs // self.rows), -(-inputs // self.columns)


def block_scales(hf: Mapping[str, Any]) -> BlockScales | None:
    """Return how a parsed config.json says that its weights are stored in 8-bit floats, or None.

    Raises ValueError for a form that is not read.
    """
    said = hf.get(KEY)
    if not isinstance(said, Mapping) or said.get("quant_method") != FLOATS:
        return None
    size: Any = said.get("weight_block_size")
    is_pair = isinstance(size, list) and len(size) == 2
    if not (is_pair and all(integers(1, MOST_BLOCK).read(each) for each in size)):
        raise _not_read("weight_block_size", size, "a scale for each block of two sizes is read")
    if said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):  # two names of one form
        raise _not_read("fmt", said["fmt"], "it must be e4m3")
    rows, columns = size
    return BlockScales(rows, columns)


def _not_read(key: str, value: object, limit: str) -> ValueError:
    return ValueError(
        f"the model's configuration has {KEY}.{key}: {abbreviate(value)}; of 8-bit floats {limit}: use"
        " another checkpoint"
    )


def quantization(hf: Mapping[str, Any]) -> Quantization | None:
    """Return how a parsed config.json says that its weights are quantised.

    Raises ValueError for a form that is not read.
    """
    if hf.get("compression_config"):
        raise _refused("compression_config", "an older layout")
    if not hf.get(KEY):
        return None
    said = hf[KEY]
    if not isinstance(said, Mapping):
        raise _refused(KEY, abbreviate(said))
    method, compressed = said.get("quant_method"), "compressed-tensors"
    if method in (FLOATS, *PACKED) or (method == compressed and said.get("format") == PACKED_FORMAT):
        return None  # it is read as if it were not quantised
    for name, only in (("quant_method", compressed), ("format", "int-quantized")):
        if said.get(name) != only:
            raise _refused(f"{KEY}.{name}", abbreviate(said.get(name)))
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = said.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _refused(f"{KEY}.{name}", abbreviate(value))
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused(f"{KEY}.config_groups", "not one group")
    ((label, group),) = groups.items()
    label = f"{KEY}.config_groups.{label:.60}"
    if (
        not isinstance(group, Mapping)
        or group.get("targets") != ["Linear"]
        or group.get("output_activations")
    ):
        raise _refused(label, "more or less than weights and input_activations of targets ['Linear']")
    if group.get("format") not in (None, "int-quantized"):
        raise _refused(f"{label}.format", abbreviate(group["format"]))
    for part, scheme in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
        _check(f"{label}.{part}", group.get(part), scheme)
    return Quantization(ignored(said.get("ignore"), "ignore"))


def covers(name: str, ignore: tuple[str, ...]) -> bool:
    """Whether a checkpoint's linear of this name is none of those in `ignore`.

    A text model within another may be named there as it is stored.
    """
    names, patterns = _apart(ignore)
    spelled = (name, *stored_spellings(name))
    if not names.isdisjoint(spelled):
        return False
    for pattern in patterns:  # a plain loop: a mixture has tens of thousands of names
        for one in spelled:
            if pattern.match(one):
                return False
    return True


@lru_cache(maxsize=64)
def _apart(ignore: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return the whole names among what is left out, and its patterns, compiled."""
    names = frozenset(each for each in ignore if not each.startswith("re:"))
    return names, tuple(re.compile(each[3:]) for each in ignore if each.startswith("re:"))


def ignored(said: Any, key: str) -> tuple[str, ...]:
    """Return the names and patterns of linears that a file leaves unquantised, under this key.

    Raises ValueError for anything else, and for patterns that may take long to match.
    """
    ignore, key = said or [], f"{KEY}.{key}"
    if not isinstance(ignore, list) or not all(isinstance(each, str) for each in ignore):
        raise _refused(key, abbreviate(ignore))
    if len(ignore) > MOST_IGNORED:
        raise _refused(key, f"{len(ignore)} entries, more than {MOST_IGNORED}")
    for each in ignore:
        try:
            if each.startswith("re:"):
                re.compile(each[3:])
                _check_pattern(each[3:], key)
        except (re.error, RecursionError, OverflowError) as error:
            raise _refused(key, f"{abbreviate(each)}, which is no regular expression") from error
    return tuple(ignore)


def _check_pattern(pattern: str, key: str) -> None:
    """Raise ValueError for a regular expression that may take long to match."""
    if (
        len(pattern) > MOST_PATTERN
        or REPEATED_GROUP.search(pattern)
        or len(REPEAT.findall(pattern)) > MOST_REPEATS
    ):
        what = f"{abbreviate(pattern)}, a pattern with a repeated group, more than {MOST_REPEATS} repeats"
        raise _refused(key, f"{what} or {MOST_PATTERN} characters")


def _check(label: str, found: Any, scheme: Mapping[str, Any]) -> None:
    if not isinstance(found, Mapping):
        raise _refused(label, abbreviate(found))
    for name, only in scheme.items():
        value = found.get(name, {"type": "int", "symmetric": True, "dynamic": False}.get(name))
        if value != only:
            raise _refused(f"{label}.{name}", f"{abbreviate(value)} in place of {only!r}")


def _refused(key: str, value: str) -> ValueError:
    return ValueError(
        f"the model's configuration has {key}: {value}; read are int8 weights by channel with int8"
        " activations by token in compressed-tensors' int-quantized format, its pack-quantized format, awq"
        f" and gptq: {FIX}"
    )
