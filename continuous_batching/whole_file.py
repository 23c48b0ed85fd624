"""How is a file written whole, or not at all?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from continuous_batching.system_error import naming


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[IO[str]]:
    """A text file that takes the place of what was there once all is written; after an error it does not.

    A pipe or a device is written to directly. A full disk, or a file too large, is said of `path`.
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
