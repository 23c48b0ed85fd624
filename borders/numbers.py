"""Read a number that comes from outside, and hold it to its bounds.

Fields of requests, recipes, a model's configuration, environment variables and command lines all read their
numbers here. `read` takes what JSON, YAML or Python made of one, `parse` takes text. Neither raises: for
anything but a number within the bounds the result is None, and the caller words its own refusal with the
limit, which is `str` of the range.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)
_MOST_DIGITS = 20  # Python takes long to read a number of many digits, and refuses it in other words


@dataclass(frozen=True, slots=True)
class Range(Generic[Number]):
    """The integers or the numbers from `least` to `most`, and perhaps one value more.

    A boolean is no number. NaN is in no range, and an infinity is only as `also`.
    """

    kind: type[Number]
    least: Number
    most: Number
    unit: str = ""  # the unit in the limit's words, such as "seconds"
    is_open: bool = False  # `least` itself is outside
    also: Number | None = None

    def __str__(self) -> str:
        article = "an integer" if self.kind is int else "a number"
        least, most = _words(self.least), _words(self.most)
        bounds = f"above {least}, at most {most}" if self.is_open else f"from {least} to {most}"
        unit = f" {self.unit}" if self.unit else ""
        return f"{article} {bounds}{unit}" + (f", or {_words(self.also)}" if self.also is not None else "")

    def __contains__(self, number: float) -> bool:
        if self.least <= number <= self.most:
            return not self.is_open or number != self.least
        return self.also is not None and number == self.also

    def read(self, given: object) -> Number | None:
        """Return a value of JSON, YAML or Python as a number of this range; an integer is a number too."""
        if isinstance(given, bool) or not isinstance(given, int if self.kind is int else (int, float)):
            return None
        return self.kind(given) if given in self else None

    def parse(self, text: str) -> Number | None:
        """Return the number of this range that a text of ASCII spells."""
        if not text.isascii():  # int() and float() would accept the digits of any script
            return None
        if self.kind is float:
            try:
                number = float(text)
            except ValueError:
                return None
            is_overflow = math.isinf(number) and "inf" not in text.lower()
            return None if is_overflow else self.read(number)
        digits = text.removeprefix("-")
        return self.read(int(text)) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


def integers(least: int, most: int, unit: str = "") -> Range[int]:
    """Return the range of the integers from `least` to `most`."""
    return Range(int, least, most, unit)


def numbers(least: float, most: float, unit: str = "") -> Range[float]:
    """Return the range of the numbers from `least` to `most`."""
    return Range(float, least, most, unit)


PORTS = integers(0, 2**16 - 1)  # 0 is any that is free
POSITIVE = Range(float, 0.0, sys.float_info.max, is_open=True)


def _words(number: float) -> str:
    """Return a bound in the fewest digits that say it exactly, if it is not too long."""
    is_whole = isinstance(number, int) or (abs(number) < 1e9 and number == int(number))
    return str(int(number)) if is_whole else f"{number:g}"
