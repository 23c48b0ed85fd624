"""Name a page by its content: a hash chained over the tokens of its prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
KEY_BYTES = 32


def page_salt(salt: str, adapter: str = "") -> str:
    """Return the salt of a request's pages, from the salt of its own and the digest of its adapter.

    The adapter stands first, and the request's salt as a hash. So no salt that a client chooses is that of an
    adapter, and all have a bounded length. Without either it is empty.
    """
    if not salt and not adapter:
        return ""
    own = hashlib.sha256(salt.encode()).hexdigest() if salt else ""
    return f"{adapter}:{own}"


def adapter_of(salt: str) -> str:
    """Return the digest of the adapter whose pages have this salt, as `page_salt` made it; "" for none."""
    adapter, colon, _ = salt.partition(":")
    return adapter if colon else ""


def page_keys(tokens: TokenIds, page_size: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the key of every full page of `tokens`; `known` are the keys of its first pages.

    A key is the sha256 of the previous key and the page's tokens; the first is chained to the salt, so equal
    keys mean equal prefixes under equal salts.
    """
    keys = list(known)
    previous = keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
    first, last = len(keys) * page_size, len(tokens) // page_size * page_size
    data = memoryview(np.ascontiguousarray(tokens[first:last], dtype="<i4").tobytes())
    width = 4 * page_size
    sha256 = hashlib.sha256
    for at in range(0, len(data), width):
        previous = sha256(previous + data[at : at + width]).digest()
        keys.append(previous)
    return keys


def key_of_group(key: bytes, group: int) -> bytes:
    """Return the key of a group's page that holds the tokens of this key's page, which is one of group 0.

    What is hashed for it has a length that no key and tokens have, so that it is the key of no other page.
    """
    return hashlib.sha256(key + b"group" + group.to_bytes(4, "little")).digest() if group else key


def short_key(key: bytes) -> int:
    """Return the first 64 bits of a page's key, which routers and page events use."""
    return int.from_bytes(key[:8], "big")
