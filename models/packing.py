"""Describe weights that a checkpoint packs as small integers, several in a word, and read its configuration.

The hub has three forms, for weights [out, in] whose inputs share scales by groups:

  - AWQ (arXiv 2306.00978; AutoAWQ, version gemm): `qweight` [in, out / 8] whose words hold outputs in the
    order 0, 2, 4, 6, 1, 3, 5, 7, `qzeros` [groups, out / 8] in the same order, `scales` [groups, out].
  - GPTQ (arXiv 2210.17323; AutoGPTQ, GPTQModel): `qweight` [in / 8, out], `qzeros` [groups, out / 8], less
    one except in checkpoint_format, or format, gptq_v2, `scales` [groups, out], and `g_idx` [in], each
    input's group.
  - compressed-tensors, format pack-quantized: `weight_packed` [out, in / 8], `weight_scale` [out, groups],
    `weight_shape`; `weight_zero_point` [out / 8, groups] if they are not symmetric, and `weight_g_idx` if
    inputs were reordered.

With 8 bits a word holds 4 numbers in place of 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from borders.refusal import abbreviate
from models.quantization import KEY, PACKED_FORMAT, covers, ignored

WORD_BITS = 32
MOST_GROUP = 2**24
IN_A_WORD = 8  # numbers of 4 bits in a word
WIDENED_ROWS = 256  # rows of a 4-bit weight that are converted to the model's type at once
ORDERS = ("group", "weight", "static", "dynamic", None)  # values of compressed-tensors' actorder
# What awq leaves unpacked, as transformers' should_convert_module reads it: a pattern for the beginning of a
# name, up to a dot or its end; or the end of a name. So "gate" is the router of an MLP, and not its gate_proj
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
FIX = "use another checkpoint of the model"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors that represent a weight are named and laid out.

    `is_turned` means that their axes are inputs (or groups) and outputs, not outputs and inputs. Weights are
    packed along outputs or inputs, zeros always along outputs. `order` is the place in a word of each of its
    values, counted from the lowest bits; empty if they are in order.
    """

    weight: str
    scale: str
    zero: str
    group: str
    is_turned: bool
    packs_outputs: bool = False
    order: tuple[int, ...] = ()
    shape: str = ""


LAYOUTS = {
    "awq": Layout("qweight", "scales", "qzeros", "g_idx", True, True, (0, 4, 1, 5, 2, 6, 3, 7)),
    "gptq": Layout("qweight", "scales", "qzeros", "g_idx", True),
    PACKED_FORMAT: Layout(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", False, shape="weight_shape"
    ),
}


@dataclass(frozen=True, slots=True)
class Int4:
    """How a linear in 4 bits is held: `group_size` inputs share a scale, or all of them if it is None."""

    group_size: int | None
    has_zeros: bool

    def num_groups(self, inputs: int) -> int:
        """Return the number of groups of a weight with so many inputs."""
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def row_bytes(self, inputs: int, scale_bytes: int) -> int:
        """Return the bytes of one output: its numbers, and for each group a scale and possibly a zero."""
        return inputs // 2 + self.num_groups(inputs) * scale_bytes * (1 + self.has_zeros)


@dataclass(frozen=True, slots=True)
class Packing:
    """Weights of `bits` each in words of int32, in one of LAYOUTS; each group of inputs has scales."""

    layout: str
    bits: int
    group_size: int | None  # inputs of a group; None: all of them are one group
    has_zeros: bool = True  # otherwise all zeros are in the middle of the range
    less_one: bool = False  # whether zeros are stored less one
    has_order: bool = False  # whether the checkpoint must give the group of each input
    ignore: tuple[str, ...] = ()  # linears that are not packed, as in Quantization
    ignored_ends: tuple[str, ...] = ()  # ends of names of linears that are not packed either
    ignored_parts: tuple[str, ...] = ()  # parts of names likewise, between dots

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    def num_groups(self, inputs: int) -> int:
        """Return the number of groups of a weight with so many inputs."""
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def weight_bytes(self, scale_bytes: int) -> float:
        """Return the mean bytes of a weight that stays packed, including its share of scales and zeros."""
        of_a_group = 0.0 if self.group_size is None else scale_bytes * (1 + self.has_zeros) / self.group_size
        return self.bits / 8 + of_a_group

    def covers(self, name: str) -> bool:
        """Whether the checkpoint's linear of this name should be packed."""
        between_dots = f".{name}."
        is_ignored = (
            name.endswith(self.ignored_ends)
            or any(part in between_dots for part in self.ignored_parts)
            or not covers(name, self.ignore)
        )
        return name.startswith("model.layers.") and not is_ignored

    def __str__(self) -> str:
        groups = "channel" if self.group_size is None else f"{self.group_size} inputs"
        return f"{self.layout} of {self.bits} bits by {groups}"


def packing(hf: Mapping[str, Any]) -> Packing | None:
    """Return how a parsed config.json says that its weights are packed.

    Raises ValueError for a form that is not read.
    """
    said = hf.get(KEY)
    if not isinstance(said, Mapping):
        return None
    method = said.get("quant_method")
    if method == "awq":
        return _awq(said)
    if method == "gptq":
        return _gptq(said)
    is_packed = method == "compressed-tensors" and said.get("format") == PACKED_FORMAT
    return _compressed(said) if is_packed else None


def _awq(said: Mapping[str, Any]) -> Packing:
    for name in ("version", "format", "checkpoint_format"):
        if said.get(name) is not None and str(said[name]).lower() != "gemm":
            raise _refused(name, said[name], "of awq the version gemm is read")
    if said.get("bits") != 4:
        raise _refused("bits", said.get("bits"), "of awq 4 bits are read")
    if said.get("zero_point", True) is not True:
        raise _refused("zero_point", said["zero_point"], "of awq it must be true")
    key = "modules_to_not_convert"
    left_out = ignored(said.get(key), key)
    ignore = ignored([f"re:(?:{each}){BOUNDARY}" for each in left_out], key)
    size = _group_size(said.get("group_size", 128))
    # AutoAWQ, which makes the files, finds an entry anywhere in a name: "self_attn" is all of a layer's
    # attention
    parts = tuple(f".{part}." for each in left_out if (part := each.strip(".")))
    return Packing("awq", 4, size, ignore=ignore, ignored_ends=left_out, ignored_parts=parts)


def _gptq(said: Mapping[str, Any]) -> Packing:
    key = "checkpoint_format" if said.get("checkpoint_format") else "format"
    kind = str(said.get(key) or "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise _refused(key, said[key], "gptq and gptq_v2 are read")
    if said.get("is_marlin_format"):
        raise _refused("is_marlin_format", said["is_marlin_format"], "gptq and gptq_v2 are read")
    if said.get("bits") not in (4, 8):
        raise _refused("bits", said.get("bits"), "of gptq 4 and 8 bits are read")
    if said.get("pack_dtype", "int32") != "int32":
        raise _refused("pack_dtype", said["pack_dtype"], "it must be int32")
    changed = said.get("dynamic") or {}
    # `-:` before a name leaves its linears out; those of another name take the numbers beside it, if any
    if not isinstance(changed, Mapping) or any(
        numbers for name, numbers in changed.items() if not str(name).startswith("-:")
    ):
        raise _refused("dynamic", changed, "all layers must have the same bits and groups")
    desc_act = said.get("desc_act", False)
    if not isinstance(desc_act, bool):
        raise _refused("desc_act", desc_act, "it must be true or false")
    size = _group_size(said.get("group_size", 128))
    ignore = ignored([f"re:{str(name)[2:]}" for name in changed if str(name).startswith("-:")], "dynamic")
    # A single group has no order
    has_order = desc_act and size is not None
    return Packing(
        "gptq", int(said["bits"]), size, less_one=kind == "gptq", has_order=has_order, ignore=ignore
    )


def _compressed(said: Mapping[str, Any]) -> Packing:
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = said.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _refused(name, value, "packed weights are read without it")
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", groups, "one group is read")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"]:
        raise _refused("config_groups", groups, "one group, of the weights of targets ['Linear'], is read")
    for name in ("input_activations", "output_activations"):
        if group.get(name):
            raise _refused(name, group[name], "packed weights are read without it")
    if group.get("format") not in (None, PACKED_FORMAT):
        raise _refused("format", group["format"], f"beside {PACKED_FORMAT} it must be the same")
    allowed: dict[str, tuple[object, ...]] = {
        "num_bits": (4, 8),
        "type": ("int", None),
        "symmetric": (True, False, None),
        "strategy": ("group", "channel"),
        "dynamic": (False, None),
        "actorder": ORDERS,
    }
    for name, values in allowed.items():
        if not any(weights.get(name) is each or weights.get(name) == each for each in values):
            listed = ", ".join(str(each) for each in values if each is not None)
            raise _refused(f"weights.{name}", weights.get(name), f"read are {listed}")
    is_grouped = weights["strategy"] == "group"
    return Packing(
        PACKED_FORMAT,
        int(weights["num_bits"]),
        _group_size(weights.get("group_size")) if is_grouped else None,
        has_zeros=weights.get("symmetric") is False,
        has_order=is_grouped and weights.get("actorder") in ("group", "dynamic"),
        ignore=ignored(said.get("ignore"), "ignore"),
    )


def _group_size(value: object) -> int | None:
    if type(value) is not int or not (value == -1 or 0 < value <= MOST_GROUP):
        raise _refused("group_size", value, f"it must be -1, or from 1 to {MOST_GROUP}")
    return None if value == -1 else value


def _refused(name: str, value: object, limit: str) -> ValueError:
    return ValueError(f"the model's configuration has {KEY}.{name}: {abbreviate(value)}; {limit}: {FIX}")
