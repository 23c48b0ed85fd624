"""Place experts on ranks so that all ranks have equal work.

The placement follows the number of tokens that chose each expert, layer by layer: the most chosen first, each
to the rank with the least load that still has room, as all ranks hold equally many (Graham's longest
processing time first, with a bound on the number; https://doi.org/10.1137/0117039). A file names the experts
of each layer in the order of their ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from borders.files import read_bounded
from borders.numbers import integers
from models.config import DecoderConfig

MOST_BYTES = 2**24  # bytes of a file: a thousand layers of a thousand experts need a third of it
# vllm-ascend's documentation of EPLB advises against it at or below this number of experts a rank, or below
# this number of tokens a rank
FEW_EXPERTS, FEW_TOKENS = 8, 128
LEAST_GAIN = 1.05  # ratio of the slowest rank's loads; a smaller gain is within the noise of the measurement
Layers = tuple[tuple[int, ...], ...]  # one number for each expert of each layer; empty for a dense layer


_TOTALS = integers(1, 2**63 - 1)


def balanced(counts: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the experts of a layer, those of the first part first, in rising order within a part."""
    room = len(counts) // parts
    assert room * parts == len(counts), f"{len(counts)} experts over {parts} parts"
    held: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for expert in sorted(range(len(counts)), key=lambda each: -counts[each]):
        part = min((each for each in range(parts) if len(held[each]) < room), key=lambda each: loads[each])
        held[part].append(expert)
        loads[part] += counts[expert]
    return tuple(expert for each in held for expert in sorted(each))


def imbalance(counts: Sequence[int], order: Sequence[int], parts: int) -> float:
    """Return the load of the most loaded part over the mean of all parts; 1 if nothing was counted."""
    room = len(order) // parts
    loads = [sum(counts[each] for each in order[part * room :][:room]) for part in range(parts)]
    return max(loads) * parts / sum(loads) if any(loads) else 1.0


def of_layers(path: Path, name: str) -> tuple[Layers, dict[str, Any]]:
    """Read the numbers under `name` in a file's JSON object, one list a layer; return them and the object.

    Raises ValueError, which names the file.
    """
    try:
        value = json.loads(read_bounded(path, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    layers = value.get(name) if isinstance(value, dict) else None
    if not isinstance(layers, list) or not all(map(_is_numbers, layers)):
        raise ValueError(f"{path} has no {name!r}: a list of numbers from 0 for each layer")
    return tuple(tuple(layer) for layer in layers), value


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(integers(0, 2**63 - 1).read(each) is not None for each in value)


def read(path: Path, config: DecoderConfig) -> Layers:
    """Read the placement in a file; raises ValueError if it is not for this model."""
    layers, _ = of_layers(path, "placement")
    assert config.mixture is not None, "a dense model has nothing to place"
    count = config.mixture.num_experts
    if len(layers) != config.num_layers:
        raise ValueError(f"{path} is of {len(layers)} layers, and the model has {config.num_layers}")
    for number, layer in enumerate(layers):
        has_experts = config.mixture_of(number) is not None
        if sorted(layer) != list(range(count if has_experts else 0)):
            wanted = f"each of {count} experts once" if has_experts else "no expert: it is dense"
            raise ValueError(f"{path}: layer {number} must name {wanted}")
    return layers


def proposed(path: Path, parts: int) -> tuple[Layers, list[str]]:
    """Return the placement that follows from the counts in a file, and its effect in words.

    Raises ValueError for a file without counts, or experts that cannot be spread over so many parts.
    """
    counts, said = of_layers(path, "counts")
    _check(path, counts, parts)
    placement = tuple(balanced(layer, parts) if layer else () for layer in counts)
    before = [imbalance(layer, range(len(layer)), parts) for layer in counts if layer]
    after = [imbalance(layer, order, parts) for layer, order in zip(counts, placement) if layer]
    lines = [
        f"{name}: the most loaded of {parts} ranks has {sum(loads) / len(loads):.3f} times the mean,"
        f" {max(loads):.3f} at worst"
        for name, loads in (("as they are numbered", before), ("as proposed", after))
    ]
    warnings = _warnings(counts, parts, said, sum(before) / sum(after))
    return placement, lines + [f"it may not pay: {each}" for each in warnings]


def _check(path: Path, counts: Layers, parts: int) -> None:
    sizes = {len(layer) for layer in counts if layer}
    if len(sizes) != 1 or not any(map(any, counts)):
        raise ValueError(f"{path} counts no tokens of equally many experts in each layer that has any")
    (size,) = sizes
    possible = [str(each) for each in range(2, size + 1) if size % each == 0]
    if size % parts:
        raise ValueError(
            f"{parts} ranks cannot hold {size} experts evenly; choose one of {', '.join(possible)}"
        )


def _warnings(counts: Layers, parts: int, said: dict[str, Any], gain: float) -> list[str]:
    """Return the reasons why a placement by these counts may cost more than it brings."""
    held, found = max(map(len, counts)) // parts, []
    if held <= FEW_EXPERTS:
        found.append(f"a rank holds {held} experts; vllm-ascend advises against it up to {FEW_EXPERTS}")
    steps, chosen = (_TOTALS.read(said.get(name)) for name in ("steps", "num_chosen"))
    if steps is not None and chosen is not None:
        tokens = max(map(sum, counts)) / chosen / steps / parts
        if tokens < FEW_TOKENS:
            found.append(
                f"a step has {tokens:.0f} tokens a rank; vllm-ascend advises against it below {FEW_TOKENS}"
            )
    if gain < LEAST_GAIN:
        found.append(f"the most loaded rank would have {100 * (1 - 1 / gain):.1f} % less to do")
    return found
