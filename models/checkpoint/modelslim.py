"""Find the destinations of the tensors that msModelSlim stores of a weight, by the types of its description.

W8A8_DYNAMIC has `weight` int8 [out, in], `weight_scale` [out, 1] and `weight_offset` [out, 1], which is zero:
the weights are symmetric. W8A8 has `deq_scale` [out], which is the product of the inputs' scale and the
weight's, `quant_bias` int32 [out], which holds the linear's bias and what the inputs' offset adds,
`input_scale` [1] and `input_offset` [1]; older exports have the tensors of W8A8_DYNAMIC beside them. Of
W8A8_MIX, which has the tensors of both, those of W8A8 are passed over. W4A8_DYNAMIC has two outputs in a byte
of `weight` [out / 2, in], and `scale_bias`, which follows from the weight: 8 times the sums of its rows. A
W8A16 has the tensors of W8A8_DYNAMIC, and inputs in the model's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.destination import FLOATS, Destination, check_finite, kept_rows
from models.checkpoint.files import checkpoint_files, names_in, open_checkpoint
from models.checkpoint.stored_parts import Gathering, PartDestination
from models.config import UP
from models.modelslim import CACHE_SCALE, DYNAMIC, FLOAT, MIXED, STATIC, W4A8, W8A16, Described
from models.ops.operands import unpaired
from models.parallel.share import Slices
from models.quantization import Quantization

ANY = (*FLOATS, "I8", "I32", "I64")
OF_SCALES = (*FLOATS, "I64")  # A deq_scale has one of these types
OF_INPUTS = "input_scale", "input_offset"  # one number for all inputs of a linear
STATIC_ENDS = "quant_bias", "deq_scale", *OF_INPUTS
# Tensors beside a weight that change nothing here, by type; those of ZEROS are checked
ZEROS = dict.fromkeys((DYNAMIC, MIXED, STATIC, W4A8, W8A16), ("weight_offset",))
PASSED = {MIXED: STATIC_ENDS, STATIC: ("weight_scale", "bias", *STATIC_ENDS), W4A8: ("scale_bias",)}


@dataclass(frozen=True, slots=True)
class Unused:
    """A tensor that changes nothing; if it `must_be_zero`, that is checked."""

    shape: tuple[int, ...]
    must_be_zero: bool
    stored: tuple[str, ...] = ANY
    ranges: tuple[slice, ...] = ()

    @property
    def slices(self) -> Slices:
        """What is read of it: all, or nothing."""
        return () if self.must_be_zero or not self.shape else (slice(0, 0),)

    def part(self, whole: Any) -> Tensor:
        """See Destination.part."""
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Raise ValueError if it changes something after all; see Destination.take."""
        if self.must_be_zero and bool(tensor.any()):
            raise ValueError(
                f"{file}: {name} is not zero, and what is read is symmetric: export the model again without"
                " offsets"
            )


@dataclass(frozen=True, slots=True)
class OfInputs(Destination):
    """The destination of the scale, or the offset, of a linear's inputs, which is held for each output."""

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """See Destination.take."""
        (value,) = tensor.double().tolist()
        is_scale = name.endswith(OF_INPUTS[0])
        is_right = 0 < value < math.inf if is_scale else -128 <= value <= 127 and value == round(value)
        if not is_right:
            wanted = "a scale above 0" if is_scale else "a whole number from -128 to 127"
            raise ValueError(f"{file}: {name} holds {value:g}, and it must be {wanted}; copy it again")
        self.room.fill_(value)


@dataclass(frozen=True, slots=True)
class OfOutputs(Destination):
    """The destination of `deq_scale`, of which a model in float16 stores the bits in an int64."""

    @property
    def stored(self) -> tuple[str, ...]:
        """See Destination.stored."""
        return OF_SCALES

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """See Destination.take."""
        found = scale_of(tensor)
        check_finite(file, name, found, self.dtype)
        if bool((found < 0).any()):
            raise ValueError(
                f"{file}: {name} holds {float(found.min()):.3g}, and no scale is negative; copy it again"
            )
        self.fill(found)


@dataclass(frozen=True, slots=True)
class OfChannels(Destination):
    """The destination of a cache's scales, one for each channel, or one for all of them."""

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """See Destination.take."""
        found = tensor.float()
        if not bool(((found > 0) & found.isfinite()).all()):
            raise ValueError(f"{file}: {name} holds a number that is no scale above 0; copy it again")
        self.fill(found.expand(len(self.room)) if self.shape == (1,) else found)


def scale_of(stored: Tensor) -> Tensor:
    """Return float32 scales, which an int64 holds in its low half."""
    return stored.to(torch.int32).view(torch.float32) if stored.dtype == torch.int64 else stored


ROTATION = "global_rotation"


def rotation_of(form: Quantization | None, hidden_size: int) -> Tensor | None:
    """Return the matrix [hidden, hidden] that hidden states of a model are multiplied with, or None.

    Raises ValueError if they are, and it was not exported or is another model's.
    """
    if not isinstance(form, Described) or not form.is_rotated:
        return None
    file = None if form.rotation is None else Path(form.file).parent / form.rotation
    if file is None or not file.is_file():
        raise ValueError(
            f"hidden states of the model are rotated (metadata.quarot in {Path(form.file).name}), and it has"
            " no file of the rotation (optional.quarot.rotation_map.global_rotation): export it with the"
            " rotation, or take another kind of drafts"
        )
    opened = open_checkpoint(file)
    if ROTATION not in names_in(opened):
        raise ValueError(f"{file} has no tensor {ROTATION}; copy it again")
    found: Tensor = opened.get_tensor(ROTATION).float()
    if found.shape != (hidden_size, hidden_size):
        raise ValueError(f"{file}: {ROTATION} is {list(found.shape)}, and the hidden size is {hidden_size}")
    check_finite(file, ROTATION, found, torch.float32)
    if not torch.allclose(found @ found.t(), torch.eye(hidden_size), atol=1e-2):
        raise ValueError(f"{file}: {ROTATION} is no rotation, whose rows are orthogonal; copy it again")
    return found


DescribedDestinations = dict[str, Destination | PartDestination | Unused]


def in_described(
    places: dict[str, Destination | PartDestination], form: Quantization | None, path: Path
) -> DescribedDestinations:
    """Return the destinations of a checkpoint's tensors, if msModelSlim's description says their types."""
    more: DescribedDestinations = dict(places)
    if not isinstance(form, Described):
        return more
    shapes = dict(_shapes(path))
    for name, shape in shapes.items():
        linear, _, end = name.rpartition(".")
        if (
            CACHE_SCALE.search(name)
            and f"{linear.rpartition('.self_attn.')[0]}.self_attn.o_proj.weight" in places
        ):
            own = more.get(name)
            if not isinstance(own, OfChannels):
                more[name] = Unused(shape, must_be_zero=name.endswith("offset"))
            elif shape == (1,):
                more[name] = OfChannels(own.room, shape, ())
        kind, place = form.types.get(linear, FLOAT), places.get(f"{linear}.weight")
        if kind == FLOAT or not isinstance(place, Destination):
            continue
        if end == "weight" and kind == W4A8 and form.form(linear) == "int8":
            more[name] = _widened(name, place)
        elif name in more:
            more[name] = _static(end, more[name])
        elif end in STATIC_ENDS and kind == STATIC and linear.endswith(UP):
            more |= {} if f"{linear}.weight_scale" in shapes else _multiplied_out(linear, more)
        if name not in more and (end in ZEROS.get(kind, ()) or end in PASSED.get(kind, ())):
            more[name] = Unused(shape, must_be_zero=end in ZEROS[kind])
    return more


def _static(
    end: str, place: Destination | PartDestination | Unused
) -> Destination | PartDestination | Unused:
    """Return the destination of a static linear's tensor as such, or any other as it is."""
    kinds = {"deq_scale": OfOutputs} | dict.fromkeys(OF_INPUTS, OfInputs)
    if type(place) is not Destination or end not in kinds:
        return place
    return kinds[end](place.room, place.shape, place.slices, place.order, place.ranges)


def _widened(name: str, place: Destination) -> PartDestination:
    """Return what unpacks a weight in 4 bits to int8."""
    gathering = Gathering((place,), name, lambda found: (kept_rows(unpaired(found["weight"]), place.ranges),))
    outputs, inputs = place.shape
    return PartDestination(
        gathering, "weight", (outputs // 2, inputs), of_pairs(name, place.slices), ("I8",), ("weight",)
    )


def of_pairs(name: str, slices: Slices) -> Slices:
    """Convert slices of outputs, if they are cut, to pairs of them; inputs are unchanged."""
    if not slices or slices[0] == slice(None):
        return slices
    rows = slices[0]
    if rows.start % 2 or rows.stop % 2:
        raise ValueError(f"{name} has two outputs in a byte, which tensor ranks would part: take fewer ranks")
    return (slice(rows.start // 2, rows.stop // 2), *slices[1:])


def _multiplied_out(linear: str, places: DescribedDestinations) -> dict[str, PartDestination]:
    """Return what makes the scale of a weight alone, of a linear whose inputs are not quantised.

    An older export has that scale, and then there is a destination for it already.
    """
    place = places.pop(f"{linear}.weight_scale", None)
    if not isinstance(place, Destination):
        return {}
    ends = ("deq_scale", "input_scale")
    gathering = Gathering(
        (place,),
        f"{linear}.weight_scale",
        lambda found: ((scale_of(found[ends[0]]).float() / found[ends[1]].float())[:, None],),
    )
    rows = place.slices[:1]
    outputs = (place.shape[0],)
    return {
        f"{linear}.{ends[0]}": PartDestination(gathering, ends[0], outputs, rows, OF_SCALES, ends),
        f"{linear}.{ends[1]}": PartDestination(gathering, ends[1], (1,), (), FLOATS, ends),
    }


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and the shapes of all tensors of a checkpoint."""
    for file in checkpoint_files(path):
        opened = open_checkpoint(file)
        for name in names_in(opened):
            yield name, tuple(opened.get_slice(name).get_shape())
