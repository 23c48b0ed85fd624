"""Find the places of the tensors that msModelSlim stores beside a weight, by the types of its description.

W8A8_DYNAMIC has `weight` int8 [out, in], `weight_scale` [out, 1] and `weight_offset` [out, 1], which is zero:
the weights are symmetric. W8A8_MIX adds the tensors of static activations, which are passed over here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from models.checkpoint.files import checkpoint_files, names_in, open_checkpoint
from models.checkpoint.place import FLOATS, Place
from models.checkpoint.stored_parts import PartPlace
from models.modelslim import DYNAMIC, FLOAT, MIXED, Described
from models.parallel.share import Slices
from models.quantization import Quantization

ANY = (*FLOATS, "I8", "I32", "I64")
# Tensors beside a weight that change nothing here, by type: the two that are zero are checked
ZEROS = {DYNAMIC: ("weight_offset",), MIXED: ("weight_offset",)}
PASSED = {MIXED: ("quant_bias", "deq_scale", "input_scale", "input_offset")}


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
        return () if self.must_be_zero else (slice(0, 0),)

    def part(self, whole: Any) -> Tensor:
        """See Place.part."""
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Raise ValueError if it changes something after all; see Place.take."""
        if self.must_be_zero and bool(tensor.any()):
            raise ValueError(
                f"{file}: {name} is not zero, and weights are read that are symmetric: export the model again"
                " with symmetric weights"
            )


DescribedPlaces = dict[str, Place | PartPlace | Unused]


def in_described(
    places: dict[str, Place | PartPlace], form: Quantization | None, path: Path
) -> DescribedPlaces:
    """Return the destinations of a checkpoint's tensors, if msModelSlim's description says their types."""
    more: DescribedPlaces = dict(places)
    if not isinstance(form, Described):
        return more
    for name, shape in _shapes(path).items():
        linear, _, end = name.rpartition(".")
        kind = form.types.get(linear, FLOAT)
        if kind == FLOAT or name in more or f"{linear}.weight" not in more:
            continue
        if end in ZEROS.get(kind, ()) or end in PASSED.get(kind, ()):
            more[name] = Unused(shape, must_be_zero=end in ZEROS[kind])
    return more


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a checkpoint by their names."""
    return dict(_headers(path))


def _headers(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in checkpoint_files(path):
        opened = open_checkpoint(file)
        for name in names_in(opened):
            yield name, tuple(opened.get_slice(name).get_shape())
