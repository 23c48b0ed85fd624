"""Define what a page store is, how a page is stored in one, and when an entry is the page that was requested.

An entry is a head and the page's content. The head holds the model's identity, the page's key, and a checksum
over both and the content, so that an entry that was damaged, cut short, stored under another key, or computed
by another model is recognised and not used. With a secret the checksum is a signature: an entry that somebody
else has made is not used either.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kv_cache.page_keys import KEY_BYTES


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


MAGIC = b"cbpage1\n"  # changes with the layout of an entry
HEAD_BYTES = len(MAGIC) + 3 * 32
MOST_ENTRY_BYTES = 2**29  # where a store is not told how large the entries are
_IDENTITY_AT, _KEY_AT, _SUM_AT = len(MAGIC), len(MAGIC) + 32, len(MAGIC) + 64


class WrongEntry(ValueError):
    """An entry that must not be used, with the reason."""


def identity_of(facts: Mapping[str, object]) -> bytes:
    """Return a digest of everything that a page's content depends on, except its tokens and salt."""
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()


def entry_of(content: bytes, key: bytes, identity: bytes, secret: bytes | None = None) -> bytes:
    """Return the entry of a page's content, signed with the secret if there is one."""
    assert len(key) == KEY_BYTES == len(identity), "not the key of a page, or no identity"
    return b"".join((MAGIC, identity, key, _sum(content, key, identity, secret), content))


def content_of(
    entry: bytes, key: bytes, identity: bytes, num_bytes: int, secret: bytes | None = None
) -> bytes:
    """Return the content of an entry, of `num_bytes` bytes.

    Raises WrongEntry unless the entry is this page of this model, complete and undamaged, and signed with the
    secret if there is one.
    """
    if entry[: len(MAGIC)] != MAGIC:
        raise WrongEntry("it is no page of this format")
    if entry[_IDENTITY_AT:_KEY_AT] != identity:
        raise WrongEntry("it is of another model, or of pages in another form")
    if entry[_KEY_AT:_SUM_AT] != key:
        raise WrongEntry("it is another page")
    if len(entry) != HEAD_BYTES + num_bytes:
        raise WrongEntry(f"it has {len(entry) - HEAD_BYTES} bytes, and a page {num_bytes}")
    content = entry[HEAD_BYTES:]
    if not hmac.compare_digest(entry[_SUM_AT:HEAD_BYTES], _sum(content, key, identity, secret)):
        raise WrongEntry("its checksum is another" if secret is None else "it is not signed with our secret")
    return content


def _sum(content: bytes, key: bytes, identity: bytes, secret: bytes | None) -> bytes:
    if secret is not None:
        return hmac.digest(secret, b"".join((identity, key, content)), "sha256")
    summed = hashlib.sha256(identity + key)
    summed.update(content)
    return summed.digest()
