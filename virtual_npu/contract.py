"""Define what makes a call of an operator valid, and how a violation is reported.

An operator has the schema that the wheel registers, the rules of a correct call, and a reference that
computes it on a CPU. A rule says what it demands, its source and how to fix a violation. Rules are checked in
order, so each may rely on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from virtual_npu.simulated_products import A2, PRODUCTS, Product

Capture = Literal["none", "stream", "group"]  # "group": a stream is captured and a task group is open
Summing = Literal["mm_all_reduce", "dispatch", "combine"]  # operators that add up the ranks' tensors
Breach = tuple[str, object]  # the argument and the value that violate a rule


class ContractError(ValueError):
    """A call that the hardware would refuse, or silently compute wrongly."""

    def __init__(self, operator: str, breach: Breach, rule: Rule) -> None:
        self.operator, self.rule = operator, rule.name
        self.argument, self.value = breach
        said = " ".join(str(self.value).split())
        super().__init__(
            f"{operator}: {self.argument} is {said}; {rule.demands} [{rule.name}: {rule.source}]: {rule.fix}"
        )


class Communicators(Protocol):
    """The communicators of this process, by name."""

    def size(self, name: str) -> int:
        """Return the number of its ranks; 0 where no communicator has that name."""
        ...

    def rank(self, name: str) -> int:
        """Return the rank of this process in it."""
        ...

    def add_up(self, name: str, tensor: Tensor, operation: Summing) -> Tensor:
        """Return the sum of its ranks' tensors, after waiting for all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The state of device and process that the validity of a call depends on beside its arguments.

    `held` returns the pages that requests hold, and `on_device` whether a tensor lies in the device's memory;
    where either is None, nothing is known, and the rules that need it are skipped. Without `communicators`,
    this process is the only rank. `fp32` admits float32 in the rules on dtype, and changes nothing else. With
    `faithful`, calls that the hardware is known to compute wrongly are computed as wrongly; otherwise they
    are refused.
    """

    product: Product = A2
    fp32: bool = False
    faithful: bool = False
    capture: Callable[[], Capture] = lambda: "none"
    held: Callable[[], Collection[int]] | None = None
    on_device: Callable[[Tensor], bool] | None = None
    communicators: Communicators | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call by the schema's names, with defaults; `names` maps rules' names to them."""

    operator: str
    arguments: Mapping[str, Any]
    conditions: Conditions
    names: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(self.names.get(name, name))


@dataclass(frozen=True, slots=True)
class Rule:
    """One demand on a call; `check` yields the violations that it finds first."""

    name: str
    demands: str
    source: str
    fix: str
    check: Callable[[Any], Iterator[Breach]]


@dataclass(frozen=True)
class Operator:
    """One schema of the wheel, its rules, and its reference.

    `read` turns a call that passes the rules in `first` into the object that `rules` and `reference` take.
    While a call is captured, `captured` is checked in place of `rules`, which read the values of tensors.
    `names` maps the names that shared rules use to this schema's own.
    """

    schema: str
    products: tuple[Product, ...]
    source: str
    rules: tuple[Rule, ...]
    reference: Callable[[Any], Any]
    read: Callable[[Call], Any] = lambda call: call
    first: tuple[Rule, ...] = ()
    captured: tuple[Rule, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def parsed(self) -> torch._C.FunctionSchema:
        """The schema as torch parses it."""
        return torch._C.parse_schema(self.schema)

    @cached_property
    def qualified(self) -> str:
        """Namespace, name and overload, as `torch.library` expects them."""
        overload = self.parsed.overload_name
        return self.parsed.name + (f".{overload}" if overload else "")

    @property
    def name(self) -> str:
        return self.qualified.partition("::")[2]

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """Every rule, in the order in which they are checked."""
        return (*self._binding, *self.first, *self.rules, *self.captured)

    def bind(self, conditions: Conditions, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call with its arguments by name. Raises ContractError where the schema has others."""
        given = _by_position(self.parsed.arguments, args) | dict(kwargs)
        given |= {
            each.name: each.default_value
            for each in self.parsed.arguments
            if each.name not in given and each.has_default_value()
        }
        call = Call(self.name, given, conditions, self.names)
        self._check(self._binding, call)
        return call

    def __call__(self, conditions: Conditions, *args: Any, **kwargs: Any) -> Any:
        """Check the call, then compute it. Raises ContractError on a violation."""
        call = self.bind(conditions, args, kwargs)
        self._check(self.first, call)
        read = self.read(call)
        self._check(self.rules, read)
        return self.reference(read)

    def check_capture(self, conditions: Conditions, *args: Any, **kwargs: Any) -> None:
        """Check a call that a graph only records, by its shapes and the state of the capture."""
        call = self.bind(conditions, args, kwargs)
        self._check((*self.first, *self.captured), call)

    def _check(self, rules: tuple[Rule, ...], about: Any) -> None:
        for rule in rules:
            for argument, value in rule.check(about):
                raise ContractError(self.name, (self.names.get(argument, argument), value), rule)

    @cached_property
    def _binding(self) -> tuple[Rule, ...]:
        anywhere = set(PRODUCTS.values()) <= set(self.products)
        return (
            Rule(
                "schema",
                "every argument is in the schema, and every argument without a default is given",
                self.schema.partition("(")[0] + " of torch_npu 2.13.0",
                "pass the arguments by the schema's names",
                self._fits_schema,
            ),
            Rule(
                "types",
                "a tensor is a tensor, and a list of integers is a list on the host",
                "the schema: SymInt[] fixes the tiling when the call is sent",
                "pass tensors as Tensor, lengths as a list of int",
                self._has_types,
            ),
            *(() if anywhere else (self._product_rule(),)),
        )

    def _product_rule(self) -> Rule:
        return Rule(
            "product",
            f"it is there on {', '.join(each.name for each in self.products)}",
            self.source,
            "choose another operator on this product",
            self._on_product,
        )

    def _fits_schema(self, call: Call) -> Iterator[Breach]:
        known = {each.name for each in self.parsed.arguments}
        yield from ((name, "no argument of it") for name in call.arguments if name not in known)
        yield from ((name, "missing") for name in sorted(known - set(call.arguments)))

    def _has_types(self, call: Call) -> Iterator[Breach]:
        for each in self.parsed.arguments:
            kind, value = str(each.type), call.arguments[each.name]
            if value is None and kind.startswith("Optional"):
                continue
            inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
            if not _is(inner, value):
                yield each.name, f"a {type(value).__name__} where the schema has {inner}"

    def _on_product(self, call: Call) -> Iterator[Breach]:
        if call.conditions.product not in self.products:
            yield "the product", call.conditions.product.name


def is_dtype(tensor: Tensor, dtypes: Collection[torch.dtype], conditions: Conditions) -> bool:
    """Return whether a rule on dtype admits a tensor, given what the product supports and `fp32`."""
    if tensor.dtype == torch.float32 and torch.float32 not in dtypes:
        return conditions.fp32
    return tensor.dtype in dtypes


def shape(tensor: Tensor) -> str:
    """Format a tensor's shape and dtype for a message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _by_position(arguments: list[Any], args: tuple[Any, ...]) -> dict[str, Any]:
    positional = [each.name for each in arguments if not each.kwarg_only]
    extra = {f"position {at}": value for at, value in enumerate(args[len(positional) :], len(positional))}
    return dict(zip(positional, args)) | extra


def _is(kind: str, value: object) -> bool:
    match kind:
        case "Tensor":
            return isinstance(value, Tensor)
        case "List[Tensor]":
            return isinstance(value, (list, tuple)) and all(isinstance(each, Tensor) for each in value)
        case "List[int]":
            return isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
        case "List[bool]":
            return isinstance(value, (list, tuple)) and all(type(each) is bool for each in value)
        case "int" | "ScalarType":
            return isinstance(value, (int, torch.dtype)) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case _:
            return isinstance(value, str)
