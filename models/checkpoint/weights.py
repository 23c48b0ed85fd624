"""Load a checkpoint's tensors into a decoder, or fill it with random weights.

Each tensor is memory-mapped and copied directly to its place in the decoder's joined parameters; each of
several ranks reads the part that it holds, and whole rows of what it quantises, and waits for no other. Every
tensor that is missing, surplus, misshapen or wrongly typed is reported in one error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from borders.start_report import LOADING, QUANTISING, ReadingReport
from models.checkpoint.destination import Destination, Rounding
from models.checkpoint.files import checkpoint_files, names_in, open_checkpoint, tensor_names
from models.checkpoint.kept_weights import KeptWeights
from models.checkpoint.layer_parts import SINKS, LayerParts
from models.checkpoint.modelslim import OF_INPUTS, OfChannels, in_described, of_pairs
from models.checkpoint.stacked_experts import AnyDestination, Destinations, PackedStack, in_stacks
from models.checkpoint.stored_parts import PartDestination, in_parts
from models.checkpoint_names import HARMLESS, PREDICTION, TOWERS, wrapped_in
from models.config import FUSED, GATE_UP, MLP_ROLES, QKV, DecoderConfig, Form
from models.decoder import Decoder, DecoderLayer
from models.layers.latent import UpProjection
from models.layers.linear import Linear
from models.modelslim import CACHE_ENDS, description_in
from models.ops.operands import MIDDLE
from models.packing import IN_A_WORD, Int4
from models.parallel.share import Share, Slices

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOST_FAULTS = 3  # most faults of a kind that a refusal names
# Bytes after which a file is mapped again, because pages read from a mapping count as the process's memory
MAPPED_BYTES = 2**27
# How the names of norms end to which 1 is added, where it is, also those before a prediction layer
NORM_ENDS = ("norm.weight", "norm_embedding.weight", "norm_hidden.weight")
RANDOM_CACHE_SCALE = 1 / 32  # keys and values of random weights are near one


def load(
    decoder: Decoder,
    path: str | Path,
    tell: Callable[[str], None] = lambda _: None,
    kept: KeptWeights | None = None,
) -> int:
    """Fill the decoder from the checkpoint directory `path`, and pack it; return the bytes of tensors read.

    `tell` is given how much has been read, in words. What is `kept` of these weights is taken from there, or
    is kept from now on. Raises one ValueError that names every tensor that is missing, surplus, misshapen or
    wrongly typed.
    """
    num_bytes = 0 if kept is None else kept.take(decoder)
    if not num_bytes:
        num_bytes = _read_checkpoint(decoder, Path(path), tell)
        if kept is not None:
            kept.keep(decoder)
    tell("packing its weights")
    decoder.pack()
    return num_bytes


def _read_checkpoint(decoder: Decoder, path: Path, tell: Callable[[str], None]) -> int:
    """Fill the decoder from a checkpoint directory; return the bytes read."""
    own, config = destinations_by_name(decoder), decoder.config
    parts = in_described(in_parts(own, config.stored_form, path), config.quantization, path)
    places = in_stacks(parts, config, path)
    has_twin = config.tie_embeddings and EMBEDDING in places
    known = {HEAD: places[EMBEDDING], **places} if has_twin else places
    share, stored = decoder.share, tensor_names(path)
    if has_twin and HEAD in stored and EMBEDDING not in stored:  # one tensor, stored by its other name
        places = {HEAD if name == EMBEDDING else name: place for name, place in places.items()}

    def is_unread(name: str) -> bool:
        if name.startswith(PREDICTION) or (config.reads_text_alone and name.startswith(TOWERS)):
            return True
        return share.is_elsewhere(name, config)

    found, num_bytes = fill(path, places, known, is_unread, tell)
    # A tied checkpoint may contain its head as well; if the two differ it is not tied
    heads = (file for file, names in found.items() if HEAD in names and HEAD not in places)
    for file in heads if has_twin else ():
        head = _read(open_checkpoint(file), HEAD, own[EMBEDDING])
        num_bytes += head.nbytes
        if not torch.equal(head.to(decoder.embedding), decoder.embedding[: len(head)]):
            raise ValueError(
                f"{HEAD} in {path} differs from {EMBEDDING}, yet config.json ties them; "
                "set tie_word_embeddings to false"
            )
    return num_bytes


def fill(
    path: Path,
    places: Destinations,
    known: Destinations,
    is_unread: Callable[[str], bool],
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[dict[Path, list[str]], int]:
    """Fill all destinations from the checkpoint directory `path`; return its tensors by file and the bytes.

    Tensors that are `known` beside the places may be present, and so may those that are not read. Raises as
    `load` does.
    """
    found = accounted(path, places, known, is_unread)
    num_bytes, files = 0, {name: file for file, names in found.items() for name in names}
    far = {
        name
        for name, place in places.items()
        if isinstance(place, (PartDestination, PackedStack)) and place.is_far(name, files)
    }
    counts = {file: sum(name in places for name in names) for file, names in found.items()}
    read = {file.name: count for file, count in counts.items() if count}
    rounds = any(isinstance(place, Destination) and place.rounding is not None for place in places.values())
    sizes = {file.name: file.stat().st_size for file in counts if counts[file]}
    progress = ReadingReport(tell, sizes, read, doing=QUANTISING if rounds else LOADING)
    for some in (places.keys() - far, far):
        for file, names in found.items():
            for name, tensor in _tensors(file, {name: places[name] for name in names if name in some}):
                places[name].take(file, name, tensor)
                num_bytes += tensor.nbytes
                progress.read(file.name)
    return found, num_bytes


def accounted(
    path: Path, places: Destinations, known: Destinations, is_unread: Callable[[str], bool]
) -> dict[Path, list[str]]:
    """Return the tensors of the checkpoint directory `path` by file, from the files' headers.

    Raises as `fill`.
    """
    found, faults = _account(checkpoint_files(path), places, known, is_unread)
    if faults and (wrapped := wrapped_in([name for names in found.values() for name in names])):
        prefix, fix = wrapped
        raise ValueError(
            f"the tensors' names in {path} begin with {prefix}, which transformers does not read either; save"
            f" {fix}, or rename the tensors"
        )
    if faults:
        file = description_in(path)
        source = "config.json" if file is None else f"config.json and {file.name}"
        fix = f"download the checkpoint again, or correct {source}"
        if file is not None:
            fix = "take configuration, description and weights of one export"
        raise ValueError(f"the weights in {path} are not those of its {source}: {_some_of(faults)}; {fix}")
    return found


def _some_of(faults: list[str]) -> str:
    """Return the first faults of each kind in one line, and the number of the others."""
    by_kind: dict[str, list[str]] = {}
    for fault in faults:
        by_kind.setdefault(fault.partition(":")[0], []).append(fault)
    shown = [fault for some in by_kind.values() for fault in some[:MOST_FAULTS]]
    more = [f"and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
    return "; ".join([*shown, *more])


def random(decoder: Decoder, seed: int) -> None:
    """Fill the decoder with seeded random weights of a scale that keeps logits near one, and pack it.

    Each parameter has a seed of its own, which follows from its name. With several ranks, each draws whole
    parameters, one by one, and keeps its part, so that they equal those that one rank draws; parameters of
    other stages are not drawn at all.
    """
    generator = torch.Generator(decoder.embedding.device)
    parts: dict[int, list[Destination]] = {}  # places of each parameter, in the order of its rows
    for place in destinations_by_name(decoder).values():
        parts.setdefault(place.room.untyped_storage().data_ptr(), []).append(place)
    for name, parameter in decoder.named_parameters():  # a tied head appears once, as the embedding
        if name.endswith("norm"):
            parameter.data.fill_(1.0)
        if name.endswith(("key_scale", "value_scale")):
            parameter.data.fill_(RANDOM_CACHE_SCALE)
            continue
        if name.endswith(("norm", "weight_scale", "weight_offset")) or not len(parameter):
            continue  # scales follow from what is drawn; the embedding of a stage that has none is empty
        places = parts[parameter.untyped_storage().data_ptr()]
        num_rows = [place.shape[0] for place in places]
        shape = (sum(num_rows), *places[0].shape[1:])
        is_held = decoder.group.size == 1 and all(
            place.order is None and place.rounding is None for place in places
        )
        whole = parameter.data if is_held else parameter.new_empty(shape, dtype=places[0].dtype)
        bound = math.sqrt(3.0 / shape[-1])  # uniform is three times as fast as normal
        generator.manual_seed(_seed_of(decoder, name, seed))
        if whole.dtype == torch.int32:
            whole.random_(-(2**31), 2**31, generator=generator)
            _scale_random(decoder.get_submodule(name.rpartition(".")[0]), IN_A_WORD * shape[-1])
        else:
            whole.uniform_(-bound, bound, generator=generator)
        if not is_held:
            for place, rows in zip(places, whole.split(num_rows)):
                place.fill(place.part(rows))
    decoder.pack()


def _scale_random(linear: nn.Module, inputs: int) -> None:
    """Set the scales of a linear with so many inputs that is drawn in 4 bits, with numbers from -8 to 7."""
    assert isinstance(linear, Linear), "words are those of a linear"
    assert linear.weight_scale is not None, "a weight in 4 bits has scales"
    linear.weight_scale.data.fill_(math.sqrt(3.0 / inputs) / MIDDLE)
    if linear.weight_offset is not None:
        linear.weight_offset.data.zero_()


def _seed_of(decoder: Decoder, name: str, seed: int) -> int:
    """Return the seed of a parameter of this part.

    It is the same in all parts, because layers are counted in the whole decoder.
    """
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + decoder.share.layers(decoder.config).start)
    digest = sha256(f"{seed} {'.'.join(parts)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, which a generator accepts


def destinations_by_name(decoder: Decoder) -> dict[str, Destination]:
    """Return the destination of each tensor of a checkpoint, by its name."""
    config, share = decoder.config, decoder.share
    norms: dict[str, Tensor | None] = {
        "model.norm.weight": decoder.norm,
        "model.norm.bias": decoder.norm_bias,
    }
    all_parts = LayerParts(norms, {}, [], {})
    if share.is_last and not config.tie_embeddings:
        all_parts.joined.append(("", ("lm_head",), decoder.head))
    for number, layer in zip(share.layers(config), decoder.layers):
        assert isinstance(layer, DecoderLayer), "a decoder's layers are its own"
        parts = LayerParts.of(layer, f"model.layers.{number}.", config, number)
        all_parts.whole.update(parts.whole)
        all_parts.vectors.update(parts.vectors)
        all_parts.joined.extend(parts.joined)
        all_parts.orders.update(parts.orders)
    held = {name: outputs for name, _, outputs in decoder.part.linears()}
    places = placed(all_parts, config, held, share)
    if share.holds_embedding(config):
        shape = config.vocab_size, config.hidden_size
        places[EMBEDDING] = Destination(decoder.embedding.data, shape, share.slices(EMBEDDING, config))
    return places


def placed(
    parts: LayerParts, config: DecoderConfig, held: dict[str, int], share: Share
) -> dict[str, Destination]:
    """Return the destination of each tensor of these parts, given a rank's outputs of each linear."""
    sizes = {name: (outputs, inputs) for name, inputs, outputs in config.linears()}
    orders, places = parts.orders, {}
    for name, tensor in parts.whole.items():
        if tensor is not None:
            order = orders.get(name.removesuffix(".weight"))
            added = float(config.norms_add_one and name.endswith(NORM_ENDS))
            if name.endswith(SINKS):
                heads = share.heads(config)
                places[name] = Destination(tensor.data, (config.num_heads,), heads, order, added=added)
            elif name.endswith(CACHE_ENDS):
                of = name.rpartition(".")[0]
                rows = share.slices(name, config)
                places[name] = OfChannels(tensor.data, sizes[of][:1], rows, orders.get(of))
            elif linear_name := _linear_of_joined_norm(name, config):
                rows = share.slices(f"{linear_name}.weight", config)[:1]
                places[name] = Destination(tensor.data, sizes[linear_name][:1], rows, order, added=added)
            else:
                places[name] = Destination(tensor.data, tuple(tensor.shape), (), order, added=added)
    for name, (room, shape) in parts.vectors.items():
        slices, ranges = share.slices(name, config), share.ranges(name, config)
        places[name] = Destination(room, shape, slices, ranges=ranges)
    for prefix, names, linear in parts.joined:
        names = tuple(prefix + name for name in names)
        stored = _stored_as(names, config)
        if stored is not None:
            assert isinstance(linear, Linear), "an up-projection is stored by itself"
            places |= _joined_places(stored, linear, names, sizes, share, orders, config)
            continue
        widths = [held[name] for name in names]
        for kind, rooms in rooms_of(linear, widths):
            roundings = _roundings(linear, widths if kind == "weight" else [])
            for name, room, rounding in zip_longest(names, rooms, roundings):
                outputs, inputs = sizes[name]
                form = linear.form if isinstance(linear, Linear) else "plain"
                shape = _shape(kind, outputs, inputs, form)
                # A sum over all ranks takes the quantised bias once, as it does a bias
                cut = "bias" if kind == "quant_bias" else kind
                slices = () if kind in OF_INPUTS else share.slices(f"{name}.{cut}", config)
                if isinstance(form, Int4) and kind == "weight":
                    slices = _of_words(slices)
                if form == "w4a8" and kind == "weight":
                    slices = of_pairs(name, slices)
                ranges = () if kind in OF_INPUTS else share.ranges(name, config)
                if rounding is not None and len(slices) > 1:
                    slices, rounding = slices[:1], replace(rounding, inputs=slices[1])
                places[f"{name}.{kind}"] = Destination(
                    room, shape, slices, orders.get(name), ranges, rounding=rounding
                )
    return places


def _linear_of_joined_norm(name: str, config: DecoderConfig) -> str | None:
    """Return the linear whose outputs, of all heads, this norm weighs, if it is such a norm."""
    stem, _, norm = name.removesuffix(".weight").rpartition(".")
    if config.qk_norm != "joined" or norm not in config.qk_norm_names:
        return None
    return f"{stem}.{FUSED[config.qk_norm_names.index(norm)]}"


def _stored_as(names: tuple[str, ...], config: DecoderConfig) -> str | None:
    """Return the checkpoint's name for these linears if it stores them as one."""
    block, _, role = names[0].rpartition(".")
    joined = {FUSED[0]: QKV, MLP_ROLES[0]: GATE_UP}.get(role)
    return f"{block}.{joined}" if len(names) > 1 and joined in config.stored_joined else None


def _shape(kind: str, outputs: int, inputs: int, form: Form) -> tuple[int, ...]:
    """Return the shape of a linear's tensor in a checkpoint, or as it is held in 4 bits."""
    width, count = inputs, 1
    if isinstance(form, Int4):
        width, count = inputs // IN_A_WORD, form.num_groups(inputs)
    of_scales, rows = (outputs, count), outputs // 2 if form == "w4a8" else outputs
    shapes = {"weight": (rows, width), "weight_scale": of_scales, "weight_offset": of_scales}
    return shapes.get(kind, (1,) if kind in OF_INPUTS else (outputs,))


def _of_words(slices: Slices) -> Slices:
    """Convert slices of inputs, if they are cut, to words of 8; rows are unchanged."""
    rows, inputs = slices[:1], slices[1:]
    return (*rows, *(slice(each.start // IN_A_WORD, each.stop // IN_A_WORD) for each in inputs))


def _joined_places(
    stored: str,
    linear: Linear,
    names: tuple[str, ...],
    sizes: dict[str, tuple[int, int]],
    share: Share,
    orders: dict[str, Tensor | None],
    config: DecoderConfig,
) -> dict[str, Destination]:
    """Return the destinations of tensors that join these linears; a rank reads its rows of each of them."""
    ranges, order, first, held = [], [], 0, 0
    for name in names:
        outputs, inputs = sizes[name]
        (rows,) = share.slices(f"{name}.weight", config) or (slice(0, outputs),)
        ranges.append(slice(first + rows.start, first + rows.stop))
        own = orders.get(name)
        own = torch.arange(rows.stop - rows.start) if own is None else own
        order.append(held + own)
        first, held = first + outputs, held + len(own)
    rounding = next(iter(_roundings(linear, [held])), None)
    whole, cut = torch.cat(order), tuple(ranges)
    places = {}
    for kind, (room,) in rooms_of(linear, [held]):
        shape = _shape(kind, first, inputs, linear.form)
        places[f"{stored}.{kind}"] = Destination(room, shape, (), whole, cut, rounding=rounding)
    return places


def rooms_of(linear: Linear | UpProjection, widths: list[int]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the rows of a joined linear's parameters that belong to each of the checkpoint's linears."""
    for kind in ("weight", "weight_scale", "weight_offset", "bias"):
        joined = getattr(linear, kind, None)
        if joined is not None and not (linear.rounds and kind == "weight_scale"):  # which is computed
            is_paired = kind == "weight" and linear.form == "w4a8"
            yield kind, joined.data.split([width // 2 for width in widths] if is_paired else widths)
    static = getattr(linear, "static", None)
    for kind, joined in () if static is None else static.named_parameters():
        yield kind, joined.data.split(widths)


def _roundings(linear: Linear | UpProjection, widths: list[int]) -> list[Rounding]:
    """Return how the rows of each of the checkpoint's linears are quantised at load.

    The list is empty if they are not.
    """
    if not isinstance(linear, Linear) or not linear.rounds or linear.weight_scale is None:
        return []
    scales = linear.weight_scale.data.split(widths) if widths else ()
    return [Rounding(linear, scale, slice(None)) for scale in scales]


def _tensors(file: Path, places: Destinations) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parts of a file's tensors, mapped one after the other.

    Each is valid until the next is asked for.
    """
    mapped, num_bytes = open_checkpoint(file), 0
    for name, place in places.items():
        tensor = _read(mapped, name, place)
        # A cut across rows brings the pages of all rows into memory
        num_bytes += tensor.untyped_storage().nbytes()
        yield name, tensor
        del tensor
        if num_bytes > MAPPED_BYTES:
            mapped, num_bytes = open_checkpoint(file), 0


def _read(mapped: Any, name: str, place: AnyDestination) -> Tensor:
    """Return this rank's part of a tensor of a mapped file."""
    if not (place.slices or place.ranges):
        whole: Tensor = mapped.get_tensor(name)
        return whole
    return place.part(mapped.get_slice(name))


def _account(
    files: list[Path], places: Destinations, known: Destinations, is_unread: Callable[[str], bool]
) -> tuple[dict[Path, list[str]], list[str]]:
    """Return the tensors to read from each file, and everything that is wrong with them."""
    found: dict[Path, list[str]] = {}
    faults: list[str] = []
    absent = {name: list(place.shape) for name, place in places.items()}
    seen = set()
    for file in files:
        opened = open_checkpoint(file)
        names = [name for name in names_in(opened) if not HARMLESS.fullmatch(name)]
        for name in names:
            if name in seen:
                faults.append(f"surplus: {name} is in two files")
            elif name not in known and is_unread(name):
                continue
            elif name not in known:
                faults.append(f"surplus: {name} has no place in this model")
            else:
                faults += _misfits(name, opened.get_slice(name), known[name])
            absent.pop(name, None)
        seen.update(names)
        found[file] = names
    faults += [f"missing: {name} {shape}" for name, shape in absent.items()]
    return found, faults


def _misfits(name: str, header: Any, place: AnyDestination) -> list[str]:
    faults = []
    shape, dtypes = list(place.shape), place.stored
    if header.get_shape() != shape:
        faults.append(f"misshapen: {name} is {header.get_shape()}, the model needs {shape}")
    if header.get_dtype() not in dtypes:
        faults.append(f"wrongly typed: {name} is {header.get_dtype()}, not one of {', '.join(dtypes)}")
    return faults
