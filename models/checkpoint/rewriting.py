"""Rewrite the weights of a decoder in place, from one that was loaded and packed beside it.

Captured graphs hold the addresses of packed weights, and operators their layout. So each tensor keeps its
place and takes the numbers of its counterpart; what a device's packing made of the numbers is made again for
the counterpart by the same code. Adapters are no weights of a decoder, and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.linear import StaticProducts
from models.layers.low_rank import LowRank
from models.ops.cpu.products import Products
from models.ops.reference import Ops
from models.parallel.group import Group

_OF_TORCH = vars(nn.Module()).keys()  # what every module has, such as its parameters
_STATE = ("counts", "fresh")  # tensors of modules that are no weights: what steps leave behind
Pair = tuple[Tensor, Tensor]  # a tensor in use, and the one whose numbers it takes


def pairs(old: nn.Module, new: nn.Module) -> list[Pair]:
    """Return the tensors of two packed modules in pairs.

    Raises ValueError if they are not held in the same form: a copy would not give what `new` computes.
    """
    olds, news = dict(_leaves_of(old)), dict(_leaves_of(new))
    if olds.keys() != news.keys():
        name = min(olds.keys() ^ news.keys())
        raise ValueError(f"the new weights have another form: {name} is in only one of old and new")
    made = []
    for name, held in olds.items():
        given = news[name]
        if isinstance(held, Tensor) and isinstance(given, Tensor):
            if _form(held) != _form(given):
                raise ValueError(f"{name} would be {_form(given)} with the new weights, and is {_form(held)}")
            made.append((held, given))
        elif type(held) is not type(given) or held != given:
            raise ValueError(
                f"{name} would be {given!r:.80} with the new weights, and is {held!r:.80}; numbers beside"
                " tensors are not rewritten"
            )
    return made


@torch.inference_mode()
def rewrite(found: list[Pair]) -> None:
    """Let each tensor take the numbers of its counterpart, and wait until all of them have."""
    for held, given in found:
        held.copy_(given)
    devices = {held.device for held, _ in found if held.device.type != "cpu"}
    for device in devices:
        torch.get_device_module(device).synchronize(device)


def num_bytes(whole: nn.Module) -> int:
    """Return the bytes of all tensors of a packed module, each counted once."""
    held = {id(each): each for _, each in _leaves_of(whole) if isinstance(each, Tensor)}
    return sum(each.numel() * each.element_size() for each in held.values())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, strides


def _leaves_of(whole: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and the packed forms of a module and of those within it, by name."""
    for name, module in whole.named_modules():
        if isinstance(module, LowRank):
            continue
        for own, parameter in module.named_parameters(name, recurse=False):
            yield own, parameter.data
        for own, value in vars(module).items():
            if own not in _OF_TORCH and own not in _STATE and _holds_tensors(value):
                yield from _leaves(f"{name}.{own}", value)


def _holds_tensors(value: Any) -> bool:
    """Return whether an attribute of a module is a tensor, or a form that `pack` has made of tensors."""
    if isinstance(value, (Tensor, StaticProducts)):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return is_dataclass(value) and any(_holds_tensors(getattr(value, each.name)) for each in fields(value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a packed form; operators, products and ranks are no part of it."""
    if value is None or isinstance(value, (Ops, Products, Group)):
        return
    if isinstance(value, (Tensor, bool, int, float, str, torch.dtype)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(f"{name}.{index}", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, StaticProducts):
        for own, each in vars(value).items():
            yield from _leaves(f"{name}.{own}", each)
    else:
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be rewritten in place")
