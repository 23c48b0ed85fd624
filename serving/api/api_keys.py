"""Whose request is this?"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request: its tenant ("": its key names none), and what parts its pages from others'."""

    tenant: str
    salt: str

    def salted(self, own: str) -> str:
        """Its salt with a request's own, which is hashed: whatever that is, the whole is as long."""
        return f"{self.salt}:{hashlib.sha256(own.encode()).hexdigest()[:32]}" if self.salt else own


ANYBODY = Client("", "")


def can_be_sent(key: str) -> bool:
    """Whether every client can send this key."""
    return key.isascii() and key.isprintable() and len(key.split()) == 1


def key_of_environment() -> str:
    """API_KEY, or "" without one; raises ValueError for one that no client could send."""
    given = os.environ.get("API_KEY", "")
    key = given.strip()  # a file's line may end it
    if given and not can_be_sent(key):
        raise ValueError("API_KEY must be one word of printable ASCII; mend or unset it")
    return key


class Keys:
    """The keys that open the server; with none, it is open to all who reach it."""

    def __init__(self, tenant_of: Mapping[str, str], *, share_prefixes: bool = False) -> None:
        self._known = []
        for key, tenant in tenant_of.items():
            digest = hashlib.sha256(key.encode()).digest()
            salt = "" if share_prefixes else hashlib.sha256(b"salt" + digest).hexdigest()[:32]
            self._known.append((digest, Client(tenant, salt)))

    @staticmethod
    def read(path: str) -> dict[str, str]:
        """Keys and their tenants from a file: `KEY` or `KEY TENANT # COMMENT` a line; raises ValueError."""
        tenant_of: dict[str, str] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is wrong; save it as such") from error
        for number, line in enumerate(lines, 1):
            words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
            if not words:
                continue
            if len(words) > 2:
                raise ValueError(
                    f"{path}:{number}: a line is KEY or KEY TENANT, and this has {len(words)} words"
                )
            if not can_be_sent(words[0]):
                raise ValueError(f"{path}:{number}: this key cannot be sent; it must be of printable ASCII")
            if words[0] in tenant_of:
                raise ValueError(f"{path}:{number}: this key stands there twice")
            tenant_of[words[0]] = words[1] if len(words) == 2 else ""
        if not tenant_of:
            raise ValueError(f"{path} holds no key; write one a line")
        return tenant_of

    @property
    def are_needed(self) -> bool:
        """Whether a request must bring one."""
        return bool(self._known)

    def client(self, authorization: str | None) -> Client | None:
        """Who brings this header; None if nobody that is known. It takes as long for every wrong key."""
        if not self._known:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = None
        for known, client in self._known:
            if hmac.compare_digest(known, digest):
                found = client
        return found if scheme.lower() == "bearer" else None
