"""Make keys of pages so short that nearly all of them have been seen before, with other tokens."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from kv_cache import page_keys


def shorten_keys(patch: pytest.MonkeyPatch, *, bits: int) -> None:
    """Let a key have so many bits in place of the 256 of sha256."""

    def sha256(data: bytes) -> SimpleNamespace:
        key = bytes([hashlib.md5(data).digest()[0] & 2**bits - 1])
        return SimpleNamespace(digest=lambda: key)

    patch.setattr(page_keys, "hashlib", SimpleNamespace(sha256=sha256))
