"""Let the stand-in's torch_npu take only the calls that another release of it takes.

The operators of that release are given by the text of their schemas. Those that it lacks vanish from
torch_npu, and the others refuse arguments that it does not know; what they compute is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OtherRelease:
    """A release of torch_npu: its version, the operators in question, and of each the schemas that it has."""

    version: str
    operators: Sequence[str]
    schemas: Mapping[str, Sequence[str]]


class _Overload:
    """One schema of an operator, in front of the operator that is installed."""

    def __init__(self, version: str, text: str, call: Callable[..., Any]) -> None:
        self._schema = torch._C.parse_schema(text)
        # torch_npu's own graphs name the overloads that they capture
        self.__name__ = f"{self._schema.name.partition('::')[2]}.{self._schema.overload_name or 'default'}"
        self._text, self._version, self._call = text, version, call
        self._names = [each.name for each in self._schema.arguments]
        self._most = sum(not each.kwarg_only for each in self._schema.arguments)
        self._needed = {each.name for each in self._schema.arguments if not each.has_default_value()}

    def lacks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return why this schema does not take a call, or None."""
        unknown = [name for name in kwargs if name not in self._names]
        if unknown:
            return f"unexpected keyword argument {unknown[0]!r}"
        if len(args) > self._most:
            return f"{len(args)} positional arguments where it takes {self._most}"
        absent = self._needed - {*self._names[: len(args)], *kwargs}
        return f"missing argument {min(absent)!r}" if absent else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if lacks := self.lacks(args, kwargs):
            raise TypeError(f"{self._schema.name} of torch_npu {self._version}: {lacks}; it is {self._text}")
        return self._call(*args, **kwargs)


class _Packet:
    """All schemas of an operator, as torch has them under one name."""

    def __init__(self, overloads: Mapping[str, _Overload]) -> None:
        self._overloads = overloads

    def overloads(self) -> list[str]:
        """Return the names of the overloads, as an operator of torch does."""
        return list(self._overloads)

    def __getattr__(self, name: str) -> _Overload:
        if name not in self._overloads:
            raise AttributeError(name)
        return self._overloads[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in self._overloads.values():
            if each.lacks(args, kwargs) is None:
                return each(*args, **kwargs)
        return next(iter(self._overloads.values()))(*args, **kwargs)


def enforce(torch_npu: Any, release: OtherRelease) -> Callable[[], None]:
    """Give torch_npu these operators as a release has them; returns what gives it back its own."""
    own = {name: vars(torch_npu)[name] for name in {each.partition(".")[0] for each in release.operators}}
    for name, operator in own.items():
        overloads = {
            found.partition(".")[2] or "default": _Overload(
                release.version, text, getattr(operator, found.partition(".")[2] or "__call__")
            )
            for found, texts in release.schemas.items()
            if found.partition(".")[0] == name
            for text in texts[:1]
        }
        if overloads:
            setattr(torch_npu, name, _Packet(overloads))
        else:
            delattr(torch_npu, name)

    def restore() -> None:
        for name, operator in own.items():
            setattr(torch_npu, name, operator)

    return restore
