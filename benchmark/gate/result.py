"""Read a result of a benchmark: its file, its figures, and the records of its requests.

A result is one JSON object, whose figures have dotted names, such as `ttft_ms.p50`. A figure that is absent
is never assumed: whoever reads it raises NotCheckable. One that is no number raises ValueError.

A record has `id`, `arrival_s`, `first_token_s`, `finish_s`, `prompt_tokens`, `max_tokens`, `output_tokens`,
`finish_reason` and perhaps `token_times_s`; where a client saw tokens in pieces, it has `piece_times_s`,
`end_s` of its connection and, if the client knows how many tokens are in each piece, `piece_tokens`. Answers
that ended by "stop" or "length" are completed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from borders.files import read_bounded

Fields = Mapping[str, Any]
Array = NDArray[np.float64]
DONE = ("stop", "length")
MOST_BYTES = 2**27  # most bytes of a result: 100,000 records have some 50 MiB


class NotCheckable(Exception):
    """A law does not apply; the text says why."""


def read_result(path: Path) -> dict[str, Any]:
    """Read the result in a file; raises ValueError or OSError for a file that holds none."""
    data = read_bounded(path, MOST_BYTES)
    try:
        fields = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits raises a plain ValueError
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no object; it must be one result of a benchmark")
    return fields


class Figures:
    """The figures of one result; `stated` are the file's own fields, without names that were added."""

    def __init__(self, fields: Fields, stated: Fields | None = None) -> None:
        self.fields = fields
        self.stated = fields if stated is None else stated

    def raw(self, name: str) -> Any:
        """Return the value under a name, of any type, or None."""
        value: Any = self.fields
        for part in name.split("."):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} is looked for in {value!r}, which is no object")
            value = value.get(part)
            if value is None:
                return None
        return value

    def needed(self, name: str) -> Any:
        """Return a value of any type that must be there."""
        value = self.raw(name)
        if value is None:
            raise NotCheckable(f"{name} is absent")
        return value

    def given(self, name: str) -> float | None:
        """Return a figure, or None if it is absent."""
        value = self.raw(name)
        return None if value is None else finite(name, value)

    def number(self, name: str) -> float:
        """Return a figure that must be there."""
        return finite(name, self.needed(name))

    def positive(self, name: str) -> float:
        """Return a figure that others are divided by; raises ValueError unless it is above 0."""
        value = self.number(name)
        if value <= 0:
            raise ValueError(f"{name} is {value:g}; it must be above 0")
        return value

    def numbers(self, name: str) -> Array:
        """Return a list of numbers, such as the rate of each run; raises ValueError for an empty one."""
        stated = self.needed(name)
        if not isinstance(stated, list) or not stated:
            raise ValueError(f"{name} is {stated!r}; it must be a list of numbers")
        return np.array([finite(f"an entry of {name}", each) for each in stated])

    @cached_property
    def records(self) -> list[Fields]:
        """The requests' own records; raises NotCheckable if none were kept."""
        kept = self.needed("records")
        if not isinstance(kept, list) or not all(isinstance(each, Mapping) for each in kept):
            raise ValueError("records must be a list of objects, one for each request")
        return kept

    @cached_property
    def completed(self) -> list[Fields]:
        """The records of completed requests; raises NotCheckable if there are none."""
        found = [each for each in self.records if each.get("finish_reason") in DONE]
        if not found:
            raise NotCheckable("no record is of a completed request")
        return found

    @cached_property
    def latencies_ms(self) -> dict[str, Array]:
        """The latencies of completed requests by name; gaps only if the times of all tokens are known."""
        begun_s, first_s, end_s = (
            of_each(self.completed, name) for name in ("arrival_s", "first_token_s", "finish_s")
        )
        num_gaps = of_each(self.completed, "output_tokens") - 1
        longer = num_gaps > 0
        found = {"ttft_ms": first_s - begun_s, "e2e_ms": end_s - begun_s}
        found["tpot_ms"] = (end_s - first_s)[longer] / num_gaps[longer]
        times = [times_of(record) for record in self.completed]
        if all(each is not None for each in times):
            found["itl_ms"] = np.concatenate([np.diff(each) for each in times if each] or [np.empty(0)])
        return {name: 1e3 * values for name, values in found.items()}


def finite(name: str, value: Any) -> float:
    """Return a finite number; raises ValueError for anything else."""
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        value = "an integer that no float holds"
    raise ValueError(f"{name} is {value!r}; it must be a finite number")


def number_of(record: Fields, name: str) -> float:
    """Return a number of a record; raises NotCheckable if it is absent, ValueError if it is no number."""
    found = record.get(name)
    if found is None:
        raise NotCheckable(f"{name} of request {record.get('id')} is absent")
    return finite(f"{name} of request {record.get('id')}", found)


def of_each(records: list[Fields], name: str) -> Array:
    """Return one number of each record."""
    return np.array([number_of(record, name) for record in records])


def times_of(record: Fields) -> list[float] | None:
    """Return the times of a record's tokens, or of its pieces; None if they were not kept."""
    kept = record.get("token_times_s", record.get("piece_times_s"))
    if kept is None:
        return None
    name = f"a time of request {record.get('id')}"
    if not isinstance(kept, list):
        raise ValueError(f"{name}: {kept!r} is given where a list of times must be")
    return [finite(name, each) for each in kept]


def ends_of(records: list[Fields]) -> list[float]:
    """Return when requests ended, answered or not, for the records that say so."""
    names = [(each, "finish_s" if each.get("finish_reason") in DONE else "end_s") for each in records]
    return [number_of(each, name) for each, name in names if each.get(name) is not None]
