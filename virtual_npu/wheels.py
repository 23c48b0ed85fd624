"""Compare the operators of torch_npu releases with those that this project calls, argument by argument.

    python -m virtual_npu.wheels torch_npu-2.10.0.post4-cp311-cp311-manylinux_2_28_x86_64.whl ...

The schemas are read out of each wheel's libraries, and nothing of it is imported. A release that registers an
operator without a schema in text (2.13 does so for ATB's) can only be checked by importing it.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from virtual_npu.operators import OPERATORS

_SCHEMA = re.compile(rb"(?:\w+::)?(\w+(?:\.\w+)?)\([^\0]*\) -> [^\0]+")


def schemas(wheel: Path) -> dict[str, list[str]]:
    """Return the schemas in a wheel's libraries, by the operator's name with its overload."""
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(".so"):
                for text in archive.read(member).split(b"\0"):
                    if schema := _SCHEMA.fullmatch(text):
                        found.setdefault(schema[1].decode(), []).append(text.decode(errors="replace"))
    return found


def differences(wheel: Path) -> Iterator[str]:
    """Yield a line for each operator called here that the wheel lacks or has with another schema."""
    there = schemas(wheel)
    for each in OPERATORS:
        ours = _parts(each.parsed)
        texts = there.get(each.qualified.partition("::")[2], ())
        theirs = [_parts(torch._C.parse_schema(text)) for text in texts]
        if not theirs:
            yield f"{each.qualified} is not there in text"
        elif ours not in theirs:
            names = sorted(name for name in ours | theirs[0] if ours.get(name) != theirs[0].get(name))
            yield f"{each.qualified} differs in {', '.join(names)}"


def _parts(schema: torch._C.FunctionSchema) -> dict[str, str]:
    """Return the type and default of each argument in one spelling, and the results' types."""
    arguments = {
        each.name: f"{each.type} = {each.default_value}" if each.has_default_value() else str(each.type)
        for each in schema.arguments
    }
    return arguments | {"its results": ", ".join(str(each.type) for each in schema.returns)}


def main(arguments: Sequence[str]) -> int:
    """Print the differences of each wheel; returns 1 where there are any, 2 where one cannot be read."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name in arguments:
        try:
            lines = list(differences(Path(name)))
        except (OSError, zipfile.BadZipFile) as error:
            print(f"{name} cannot be read as a wheel: {error}", file=sys.stderr)
            return 2
        print(f"{Path(name).name}: {len(OPERATORS) - len(lines)} of {len(OPERATORS)} operators are as here")
        for line in lines:
            status = 1
            print(f"    {line}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
