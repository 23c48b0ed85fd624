"""Read which libraries and symbols a shared library needs, and which symbols it defines."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

DYNAMIC, DYNSYM = 6, 11  # kinds of section
NEEDED = 1  # kind of entry in the dynamic section
WEAK = 2  # binding of a symbol


@dataclass(frozen=True, slots=True)
class Library:
    """The dynamic section of an ELF file: libraries by soname, symbols by name."""

    needed: frozenset[str]
    undefined: frozenset[str]
    defined: frozenset[str]


def read(path: Path) -> Library:
    """Read a 64-bit little-endian ELF file; weak symbols, which may stay unresolved, are left out.

    The layout is that of the ELF-64 Object File Format, version 1.5. Raises ValueError for any other file.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF library")
        (table,) = struct.unpack_from("<Q", head, 0x28)
        size, count = struct.unpack_from("<HH", head, 0x3A)
        file.seek(table)
        raw = file.read(size * count)
        sections = [struct.unpack_from("<IIQQQQIIQQ", raw, index * size) for index in range(count)]

        def data(section: tuple[int, ...]) -> bytes:
            file.seek(section[4])
            return file.read(section[5])

        needed: set[str] = set()
        undefined: set[str] = set()
        defined: set[str] = set()
        for section in sections:
            if section[1] == DYNAMIC:
                names = data(sections[section[6]])
                entries = struct.iter_unpack("<qQ", data(section))
                needed |= {_name(names, value) for kind, value in entries if kind == NEEDED}
            elif section[1] == DYNSYM:
                names = data(sections[section[6]])
                for name, info, _, place, _, _ in struct.iter_unpack("<IBBHQQ", data(section)):
                    if name and place:
                        defined.add(_name(names, name))
                    elif name and info >> 4 != WEAK:
                        undefined.add(_name(names, name))
    return Library(frozenset(needed), frozenset(undefined), frozenset(defined))


def _name(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()
