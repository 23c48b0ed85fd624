"""What can a place for pages do?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreFailed(Exception):
    """A store cannot be read from or written to now; says why in one line."""


class PageStore(Protocol):
    """Entries by their keys, which several engines may share; each method raises StoreFailed.

    It holds at most so many bytes, and lets those go that were used longest ago. Any number of threads may
    call it.
    """

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The entries of these keys, None for those that are not here."""
        ...

    def write(self, key: bytes, entry: bytes) -> bool:
        """Keep an entry; False where it is here already, or is larger than all that there is room for."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Let go of entries, as far as they are here."""
        ...

    def close(self) -> None:
        """Nothing is read or written any more."""
        ...
