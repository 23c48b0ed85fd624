"""Define the interface of a page store: entries by key, shared by several engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreFailed(Exception):
    """A store cannot be read or written now, with the reason in one line."""


class PageStore(Protocol):
    """Entries by key, which several engines may share; each method may raise StoreFailed.

    It holds a bounded number of bytes, and evicts the least recently used entries. Any number of threads may
    call it.
    """

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of these keys, None for those that are missing."""
        ...

    def write(self, key: bytes, entry: bytes) -> bool:
        """Store an entry; return False if it exists already or is larger than the whole store."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete entries, as far as they exist."""
        ...

    def close(self) -> None:
        """Release the store; no other call follows."""
        ...
