"""Can a file be read whole, without waiting for a writer and without filling the memory?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_JSON_BYTES = 2**24  # of a config.json, an index or a template: the largest published ones have 1 MiB
MOST_TOKENIZER_BYTES = 2**28  # the largest published ones have 35 MiB


def is_there(path: Path) -> bool:
    """Whether a folder has an entry of this name, even one that cannot be read.

    A link that leads nowhere counts, as it is left where a download cache was cleared: such a file is
    damaged, not absent.
    """
    return os.path.lexists(path)


def check_regular(path: Path, most_bytes: int = MOST_JSON_BYTES) -> None:
    """Raise ValueError unless `path` is a plain file of at most so many bytes; OSError if it cannot be found.

    A pipe would be waited for, and a device may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no plain file but a folder, pipe or device; download it again")
    _check_size(path, found.st_size, most_bytes)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file, which may be a pipe; raises ValueError for more than `most_bytes`."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    _check_size(path, len(data), most_bytes)
    return data


def _check_size(path: Path, num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ValueError(
            f"{path} has more than {most_bytes:,} bytes, which no file of its kind has; name the right one"
        )
