"""Read weights that a checkpoint stores in several tensors: small numbers and their scales.

The tensors of a weight are collected as they are read, from whichever file, and when the last of them is
there, the weight is computed in the model's type and stored. Within a file, the tensors of a weight are read
one after the other; if some of them are in another file, the largest is read last, so that only scales are
kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from models.checkpoint.destination import FLOATS, Destination, check_finite, kept_rows
from models.checkpoint.files import checkpoint_files, names_in, open_checkpoint
from models.checkpoint.unpacking import STORED, SUFFIX, Unpacking, scaled
from models.packing import IN_A_WORD, LAYOUTS, Packing
from models.parallel.share import Slices
from models.quantization import BlockScales

# Tensors of a weight that stays in 4 bits, as a linear has them
INT4_ENDS = "weight", "weight_scale", "weight_offset"
Found = Mapping[str, Tensor]  # what was read of a weight's tensors, by the ends of their names


@dataclass(frozen=True, slots=True)
class Gathering:
    """The tensors of one weight, until all of them are there."""

    # Destination of the weight and, if it stays in 4 bits, those of its scales and offsets
    places: tuple[Destination, ...]
    name: str  # name of the weight
    # Computes, for each place, the part of the weight that the rank reads
    made: Callable[[Found], tuple[Tensor, ...]]
    found: dict[str, Tensor] = field(default_factory=dict)

    def take(self, file: Path, end: str, tensor: Tensor, count: int) -> None:
        """Take one of `count` tensors; with the last of them, fill the weight's destinations."""
        if len(self.found) + 1 < count:
            self.found[end] = tensor.clone()  # the clone releases the mapping
            return
        try:
            made = self.made({**self.found, end: tensor})
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {self.name}: {error}; download it again") from error
        self.found.clear()
        for place, part in zip(self.places, made):
            check_finite(file, self.name, part, place.dtype)
            place.fill(part)


@dataclass(frozen=True, slots=True)
class PartDestination:
    """The destination of one of a weight's tensors, which is combined with the others."""

    gathering: Gathering
    end: str  # end of the tensor's name
    shape: tuple[int, ...]
    slices: Slices
    stored: tuple[str, ...]
    ends: tuple[str, ...]  # ends of all their names, that of the largest tensor first
    ranges: tuple[slice, ...] = ()

    def is_far(self, name: str, files: Mapping[str, Path]) -> bool:
        """Whether it is the largest of the tensors, and others are in other files."""
        stem, _, end = name.rpartition(".")
        return end == self.ends[0] and any(files[f"{stem}.{each}"] != files[name] for each in self.ends)

    def part(self, whole: Any) -> Tensor:
        """See Destination.part."""
        found: Tensor = whole[self.slices]
        return found

    def take(self, file: Path, name: str, tensor: Tensor) -> None:
        """Add the tensor to the others, and fill the weight with the last; see Destination.take."""
        self.gathering.take(file, self.end, tensor, len(self.ends))


Destinations = dict[str, Destination | PartDestination]


def in_parts(places: dict[str, Destination], form: BlockScales | Packing | None, path: Path) -> Destinations:
    """Return the destinations of a checkpoint's tensors, if it stores some weights in this form."""
    more: Destinations = dict(places)
    if form is None:
        return more
    files = [open_checkpoint(file) for file in checkpoint_files(path)]
    names = {name for opened in files for name in names_in(opened)}
    main = LAYOUTS[form.layout].weight if isinstance(form, Packing) else "weight"
    for opened in files:
        for name in names_in(opened):
            stem, _, end = name.rpartition(".")
            if end != main or f"{stem}.weight" not in places:
                continue
            if isinstance(form, Packing) or opened.get_slice(name).get_dtype() == STORED:
                for end in INT4_ENDS:
                    more.pop(f"{stem}.{end}", None)
                more |= _parts_of(stem, places, form, names)
    return more


def _parts_of(
    stem: str, places: dict[str, Destination], form: BlockScales | Packing, names: set[str]
) -> dict[str, PartDestination]:
    """Return the tensors of one linear's weight.

    Other tensors of it with a destination of their own are left out.
    """
    place = places[f"{stem}.weight"]
    rows, columns = _cuts(place)
    if isinstance(form, Packing):
        kept = tuple(places[f"{stem}.{end}"] for end in INT4_ENDS if f"{stem}.{end}" in places)
        shape = (place.shape[0], place.shape[1])
        if len(kept) > 1:  # the shape is that of words
            shape = (place.shape[0], IN_A_WORD * place.shape[1])
            columns = slice(IN_A_WORD * columns.start, IN_A_WORD * columns.stop)
        unpacking = Unpacking(form, shape, rows, columns, place.ranges, place.dtype)
        more = {end: f"{stem}.{end}" for end in unpacking.optional}
        present = {end for end, name in more.items() if name in names and name not in places}
        parts = unpacking.parts(present)
        made = unpacking.int4 if len(kept) > 1 else unpacking.weight
        gathering = Gathering(kept, f"{stem}.weight", made)
    else:
        parts = {
            "weight": (place.shape, place.slices, (STORED,)),
            f"weight{SUFFIX}": (form.shape(place.shape), (), FLOATS),
        }
        first = rows.start, columns.start

        def multiplied_out(found: Found) -> tuple[Tensor]:
            made = scaled(found["weight"], found[f"weight{SUFFIX}"], form, first)
            return (kept_rows(made, place.ranges),)

        gathering = Gathering((place,), f"{stem}.weight", multiplied_out)
    return {
        f"{stem}.{end}": PartDestination(gathering, end, *part, tuple(parts)) for end, part in parts.items()
    }


def _cuts(place: Destination) -> tuple[slice, slice]:
    """Return the rows and columns of the weight that this rank reads, or all if it reads several ranges."""
    cuts = [*place.slices, slice(None), slice(None)]
    rows, columns = (slice(*cut.indices(size)) for cut, size in zip(cuts, place.shape))
    return rows, columns
