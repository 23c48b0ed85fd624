"""Define which values a field of a request may have.

A type reads the field's value from JSON or Python and checks its bounds. `check` holds a value that was read
before, or that came from a peer or a recording, to the same bounds. Both raise BadRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

from borders.numbers import Range, integers
from borders.refusal import BadRequest, abbreviate_json

LAST_ID = 2**31 - 1  # token ids and priorities have 32 bits
LONGEST_NAME = 1024  # characters of a tenant's name, or of a salt
_IDS = integers(0, LAST_ID)


@dataclass(frozen=True, slots=True)
class FieldType:
    """Any value, which is checked where it is used; `hint` is its Python type, `allowed` says it in words."""

    hint: Any
    allowed: str

    def read(self, name: str, value: Any) -> Any:
        """Return the value in the form in which it is used."""
        return value

    def check(self, name: str, value: Any) -> None:
        """Raise BadRequest unless a value of the right type is within the bounds."""


@dataclass(frozen=True, slots=True)
class Object(FieldType):
    """A JSON object, whose content is checked where it is used."""

    def read(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise BadRequest(name, value=value, limit="an object")
        return value


@dataclass(frozen=True, slots=True)
class Numeric(FieldType):
    """A number of a range; with `takes_bool`, also true or false. `zero` is another name of 0."""

    range: Range[Any]
    takes_bool: bool = False
    zero: int | None = None

    def read(self, name: str, value: Any) -> Any:
        if self.takes_bool and isinstance(value, bool):
            return value
        if self.zero is not None and type(value) is int and value == self.zero:
            return 0
        if (found := self.range.read(value)) is None:
            raise BadRequest(name, value=value, limit=str(self.range))
        return found

    def check(self, name: str, value: Any) -> None:
        if value not in self.range:
            raise BadRequest(name, value=value, limit=str(self.range))


@dataclass(frozen=True, slots=True)
class OneOf(FieldType):
    """One of some values."""

    values: tuple[Any, ...]

    def read(self, name: str, value: Any) -> Any:
        self.check(name, value)
        return value

    def check(self, name: str, value: Any) -> None:
        if not any(type(value) is type(each) and value == each for each in self.values):
            raise BadRequest(name, value=value, limit=self.allowed)


@dataclass(frozen=True, slots=True)
class String(FieldType):
    """A string; one with a bound is stored and sent on, so that it has to be Unicode."""

    longest: int | None = None

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise BadRequest(name, value=value, limit="a string")
        self.check(name, value)
        return value

    def check(self, name: str, value: str) -> None:
        if self.longest is not None:
            _check_count(name, value, 0, self.longest, "characters")
            check_unicode(name, value)


@dataclass(frozen=True, slots=True)
class Strings(FieldType):
    """One string or several, as a tuple."""

    most: int
    longest: int

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, (list, tuple)) or not all(isinstance(each, str) for each in strings):
            raise BadRequest(name, value=value, limit="a string or a list of strings")
        self.check(name, strings)
        for each in strings:
            check_unicode(name, each)
        return tuple(strings)

    def check(self, name: str, value: Sequence[str]) -> None:
        _check_count(name, value, 0, self.most, "strings")
        for each in value:
            _check_count(name, each, 1, self.longest, "characters in one string")


@dataclass(frozen=True, slots=True)
class TokenIds(FieldType):
    """A list of token ids, as a tuple."""

    most: int
    least: int = 0

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):  # JSON has no tuples, but Python's requests may
            raise BadRequest(name, value=value, limit="a list of token ids")
        self.check(name, value)
        if value and ({*map(type, value)} != {int} or min(value) < 0 or max(value) > LAST_ID):
            # The loop only finds the wrong one; long prompts are checked above.
            for index, token in enumerate(value):
                if _IDS.read(token) is None:
                    raise BadRequest(name, value=token, limit=f"a token id, {_IDS}", place=f"[{index}]")
        return tuple(value)

    def check(self, name: str, value: Sequence[int]) -> None:
        _check_count(name, value, self.least, self.most, "token ids")


@dataclass(frozen=True, slots=True)
class Biases(FieldType):
    """An object of numbers by token ids."""

    most: int
    range: Range[float]

    def read(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise BadRequest(
                name, value=value, limit='an object of token ids and numbers, such as {"5": -1.5}'
            )
        biases = {}
        for key, bias in value.items():
            if (token := _IDS.parse(str(key))) is None:
                limit = f"an object whose keys are token ids; {abbreviate_json(key)} is none"
                raise BadRequest(name, value=value, limit=limit)
            if (found := self.range.read(bias)) is None:
                raise BadRequest(name, value=bias, limit=str(self.range), place=f"[{token}]")
            biases[token] = found
        self.check(name, biases)
        return biases

    def check(self, name: str, value: Mapping[int, float]) -> None:
        _check_count(name, value, 0, self.most, "tokens")
        for token, bias in value.items():
            if bias not in self.range:
                raise BadRequest(name, value=bias, limit=str(self.range), place=f"[{token}]")


def integer(
    least: int,
    most: int = LAST_ID,
    allowed: str = "",
    *,
    also: int | None = None,
    zero: int | None = None,
    takes_bool: bool = False,
) -> Numeric:
    """Return the type of integers within bounds."""
    values = Range(int, least, most, also=also)
    if zero is not None:
        allowed = str(integers(zero, most))
    return Numeric(int | bool if takes_bool else int, allowed or str(values), values, takes_bool, zero)


def number(least: float, most: float, unit: str = "", *, is_open: bool = False) -> Numeric:
    """Return the type of numbers within bounds."""
    values = Range(float, least, most, unit, is_open)
    return Numeric(float, str(values), values)


def choice(*values: str | bool) -> OneOf:
    """Return the type of a few values."""
    *others, last = (f'"{each}"' if isinstance(each, str) else str(each).lower() for each in values)
    strings = tuple(each for each in values if isinstance(each, str))
    hint: Any = bool
    if strings:
        hint = Literal[strings] if len(strings) == len(values) else bool | Literal[strings]
    return OneOf(hint, f"{', '.join(others)} or {last}", values)


def _check_count(name: str, value: Sized, least: int, most: int, of_what: str) -> None:
    if not least <= len(value) <= most:
        limit = f"{least} to {most}" if least else f"at most {most}"
        problem = f"has {len(value)} {of_what}; it must have {limit}"
        raise BadRequest(name, problem, value=len(value), limit=limit)


def label() -> String:
    """Return the type of names, which are stored, sent on, and may be shown."""
    return String(str, f"a string of at most {LONGEST_NAME} characters", LONGEST_NAME)


def strings(most: int, longest: int, *, or_one: bool = False) -> Strings:
    """Return the type of lists of strings; `or_one` says that one string alone is a usual form."""
    allowed = f"a list of up to {most} strings, of up to {longest} characters each"
    return Strings(
        str | list[str] if or_one else list[str],
        f"a string, or {allowed}" if or_one else allowed,
        most,
        longest,
    )


def token_ids(most: int = LAST_ID, *, least: int = 0) -> TokenIds:
    """Return the type of lists of token ids."""
    bounds = f" of {least} to {most}" if least else f" of up to {most}" if most < LAST_ID else " of"
    return TokenIds(list[int], f"a list{bounds} token ids", most, least)


def biases(most: int, range: Range[float]) -> Biases:
    """Return the type of objects of numbers by token ids."""
    allowed = f"an object of up to {most} token ids, each with {range}"
    return Biases(dict[str, float], allowed, most, range)


def check_unicode(field: str, text: str, *, place: str = "") -> None:
    """Raise BadRequest for lone surrogates, which JSON can write and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"is not Unicode text: character {error.start} is half a surrogate pair"
        raise BadRequest(field, problem, place=place) from error
