"""Place LoRA adapters in a decoder's linears, and read the part that a rank holds.

The low-rank products themselves are in `low_rank`, the checks of the files in `adapter_files`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.adapter_files import WEIGHTS, AdapterFiles
from models.checkpoint.destination import check_finite
from models.checkpoint.files import names_in, open_checkpoint
from models.checkpoint_names import TOWERS
from models.config import FUSED, GATE_UP, MLP_ROLES, QKV, DecoderConfig
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.layers.low_rank import AdapterRooms, LowRank
from models.layers.mlp import MLP

# A linear is called as the trained model does, which may hold the text model within one that reads images,
# too, or be a decoder without its head
_TENSOR = re.compile(
    r"base_model\.model\.((?:model\.|language_model\.)*(layers\.\d+\.[\w.]+))\.lora_([AB])\.weight"
)
_BEFORE = "base_model.model."
# Linears that a checkpoint, and so an adapter, may store as one
_JOINED = {QKV: FUSED, GATE_UP: MLP_ROLES[:2]}


Parts = dict[int, tuple[Tensor, Tensor]]  # A [r, in] and B [out, r] of a linear, by the number of its place
NOTHING = torch.empty(0, 1), torch.empty(1, 0)  # stands for a linear that an adapter does not change


@dataclass(frozen=True, slots=True)
class _Room:
    """The place of the two tensors of a linear."""

    name: str  # name of the linear in a checkpoint
    low_rank: LowRank
    index: int  # index among the linears that `low_rank` serves
    outputs: slice  # outputs of the linear that this rank computes
    inputs: slice  # inputs of the linear on this rank
    order: Tensor | None  # order of its outputs on this rank


class Adapters:
    """The places for adapters of a decoder, in its linears of attention and of MLPs that are no experts."""

    def __init__(self, decoder: Decoder, most: int, rank: int) -> None:
        self._config, self._dtype = decoder.config, TORCH_DTYPES[decoder.config.dtype]
        decoder.adapters = self.rooms = AdapterRooms(most, rank, decoder.attention.device)
        self._sizes = {name: (inputs, outputs) for name, inputs, outputs in decoder.config.linears()}
        self._rooms = list(self._attached(decoder))
        # The digest of the files in each place, by which another engine names the same adapter
        self.digests: dict[int, str] = {}
        self._is_elsewhere = lambda name: decoder.share.is_elsewhere(name, decoder.config)

    def _attached(self, decoder: Decoder) -> Iterator[_Room]:
        config, share, device = decoder.config, decoder.share, decoder.attention.device
        sizes = {name: each for name, *each in decoder.part.linears()}
        for number, layer in zip(share.layers(config), decoder.layers):
            for names, linear, orders in _linears(layer, f"model.layers.{number}.", config, number):
                widths, inputs = [sizes[name][1] for name in names], sizes[names[0]][0]
                linear.low_rank = LowRank(self.rooms, decoder.ops, inputs, widths, self._dtype, device)
                for index, (name, order) in enumerate(zip(names, orders)):
                    slices = share.slices(f"{name}.weight", config)
                    rows = slices[0] if slices else slice(None)
                    columns = slices[1] if len(slices) > 1 else slice(None)
                    yield _Room(name, linear.low_rank, index, rows, columns, order)

    def read(self, files: AdapterFiles) -> Parts:
        """Read what this rank holds of an adapter into the host's memory.

        Raises ValueError if the adapter is not for this model. It may run beside steps, in another thread.
        """
        opened = open_checkpoint(files.folder / WEIGHTS)
        parts = {}
        for at, (linear, stored, down, up) in self._found(files, opened).items():
            room = self._rooms[at]
            names = self._parts(linear)  # a joined linear has their rows in this order
            first = sum(self._sizes[name][1] for name in names[: names.index(room.name)])
            a, b = (self._read(files, opened, each, files.scale_of(stored)) for each in (down, up))
            b = b[first : first + self._sizes[room.name][1]][room.outputs]
            b = b if room.order is None else b[room.order]
            parts[at] = a[:, room.inputs], b * files.scale_of(stored)
        return parts

    def put(self, number: int, parts: Parts) -> None:
        """Write an adapter that was read to the place `number`, counted from 1, replacing what was there."""
        for at, room in enumerate(self._rooms):
            room.low_rank.put(number, room.index, *parts.get(at, NOTHING))

    def _read(self, files: AdapterFiles, opened: Any, name: str, scale: float) -> Tensor:
        tensor: Tensor = opened.get_tensor(name).float()
        check_finite(files.folder / WEIGHTS, name, tensor * max(1.0, abs(scale)), self._dtype)
        return tensor

    def _found(self, files: AdapterFiles, opened: Any) -> dict[int, tuple[str, str, str, str]]:
        """Return, for each place that the adapter fills, the linear by its own name and as the trained model
        calls it, and its two tensors' names.

        What an adapter adds to a tower for images, which is not read, does not count.
        """
        known = {room.name: at for at, room in enumerate(self._rooms)}
        pairs: dict[str, dict[str, str]] = {}
        called: dict[str, str] = {}
        for name in names_in(opened):
            if self._config.reads_text_alone and name.removeprefix(_BEFORE).startswith(TOWERS):
                continue
            match = _TENSOR.fullmatch(name)
            linear = f"model.{match[2]}" if match else ""
            parts = self._parts(linear)
            is_here = any(part in known for part in parts)
            if match is None or not (is_here or (parts and all(map(self._is_elsewhere, parts)))):
                raise ValueError(
                    f"{files.folder}: {name[:120]} changes what adapters cannot change here: they are of"
                    f" {', '.join(sorted({each.rpartition('.')[2] for each in known}))}"
                )
            if is_here and called.setdefault(linear, match[1]) != match[1]:
                raise ValueError(
                    f"{files.folder}: {WEIGHTS} has both {called[linear]} and {match[1]}; save it again"
                )
            if is_here:
                pairs.setdefault(linear, {})[match[3]] = name
        found: dict[int, tuple[str, str, str, str]] = {}
        for linear, pair in pairs.items():
            parts, stored = self._parts(linear), called[linear]
            outputs = sum(self._sizes[part][1] for part in parts)
            rank = files.rank_of(stored)
            shapes = {"A": [rank, self._sizes[parts[0]][0]], "B": [outputs, rank]}
            given = {which: opened.get_slice(name).get_shape() for which, name in pair.items()}
            if given != shapes:
                raise ValueError(f"{files.folder}: {stored} has {given}, and this model needs {shapes}")
            found |= dict.fromkeys([known[part] for part in parts], (linear, stored, pair["A"], pair["B"]))
        return found

    def _parts(self, linear: str) -> list[str]:
        """Return the linears that an adapter calls by this name; none if the model has no such linears."""
        block, _, role = linear.rpartition(".")
        names = [f"{block}.{each}" for each in _JOINED.get(role, (role,))]
        return names if all(name in self._sizes for name in names) else []


def _linears(
    layer: Any, prefix: str, config: DecoderConfig, number: int
) -> Iterator[tuple[list[str], Linear, list[Tensor | None]]]:
    """Yield a layer's linears, with the checkpoint's linears that each joins and their outputs' order."""
    attention, mlp = layer.attention, layer.mlp
    for roles, linear in attention.joined():
        names = [f"{prefix}self_attn.{role}" for role in roles]
        yield names, linear, [attention.order(role) for role in roles]
    if isinstance(mlp, MLP):
        ((gate, up, down),) = config.mlp_names(number, prefix)
        yield [gate, up], mlp.gate_up, [None, None]
        yield [down], mlp.down, [None]
