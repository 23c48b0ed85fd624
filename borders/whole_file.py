"""Write a file as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from borders.system_error import naming


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[IO[str]]:
    """Yield a text file that replaces `path` once it is written; after an error `path` is unchanged.

    A pipe or a device is written to directly. The error of a full disk, or of a file that is too large, names
    `path`.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with naming(path), target.open("w", encoding="utf-8") as output:
            yield output
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as output:
            yield output
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
