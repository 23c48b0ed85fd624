"""Find the client that a key belongs to, and what that client may ask for.

Keys come from a file, or one from the environment, and only their digests are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from borders.field_types import LAST_ID
from borders.files import MOST_JSON_BYTES, in_one_line, read_bounded
from borders.numbers import integers
from borders.refusal import BadRequest, abbreviate_json

GATEWAY = "*"  # stands for a key's tenant where the key may name the tenant of each request
_PRIORITY = "max_priority="


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that a line of the keys file gives its key.

    A key without a tenant is a tenant of its own. If `max_priority` is not None, the key may ask for no
    higher priority.
    """

    tenant: str = ""
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, as its key identifies it.

    Only `owner` may see the request and end it, the request counts against the share of `tenant`, and `salt`
    separates its prefix-cache pages from those of others. `lasting` identifies the key in data that outlives
    the server's process. Without keys, all of these are "".
    """

    owner: str
    tenant: str
    salt: str
    names_tenants: bool  # a gateway, which names the tenants of its own clients
    max_priority: int | None = None  # the highest priority that it may ask for; None: any
    lasting: str = ""

    @property
    def may_operate(self) -> bool:
        """Whether this client is an operator.

        The environment's key and gateways are; without keys, anybody is.
        """
        return self.max_priority is None

    def tenant_for(self, named: str | None, user: str | None) -> str:
        """Return the tenant of a request, given the tenant and the user that it names, if any.

        Raises BadRequest where the key may not name a tenant other than its own, which would evade its share.
        """
        if self.names_tenants:
            return named or user or self.tenant
        if named and named != self.tenant:
            raise BadRequest(
                "tenant",
                f"is {abbreviate_json(named)}, and this key has a tenant of its own",
                value=named,
                fix=f"leave it out; a key whose tenant is {GATEWAY} in the keys file may name others",
            )
        return self.tenant

    def priority_for(self, asked: int | None) -> int:
        """Return the priority of a request that asks for `asked`, or for none.

        Raises BadRequest for a priority above the key's, which would put it before requests of other keys.
        """
        if self.max_priority is None or asked is None:
            return asked or min(0, self.max_priority or 0)
        if asked > self.max_priority:
            raise BadRequest(
                "priority",
                f"is {asked}, and this key may ask for at most {self.max_priority}",
                value=asked,
                limit=self.max_priority,
                fix=f"lower it; {_PRIORITY}N behind the key in the keys file allows more",
            )
        return asked

    def salted(self, own: str) -> str:
        """Return this client's salt joined with the request's own, hashed so that the length is constant."""
        return f"{self.salt}:{hashlib.sha256(own.encode()).hexdigest()[:32]}" if self.salt else own


ANYBODY = Client("", "", "", names_tenants=True)


def can_be_sent(key: str) -> bool:
    """Return whether every client can send this key."""
    return key.isascii() and key.isprintable() and len(key.split()) == 1


def key_of_environment() -> str:
    """Return API_KEY, or "" if it is not set; raises ValueError for a key that no client could send."""
    given = os.environ.get("API_KEY", "")
    key = given.strip()  # the value may come from a file with a line break
    if given and not can_be_sent(key):
        raise ValueError("API_KEY must be one word of printable ASCII; correct or unset it")
    return key


class ApiKeys:
    """The keys that the server accepts; without keys it accepts everybody who reaches it.

    A key without a tenant is a tenant of its own, whose name cannot appear in a keys file.
    """

    def __init__(self, rights_of: Mapping[str, Rights], *, share_prefixes: bool = False) -> None:
        self._known = []
        for number, (key, rights) in enumerate(rights_of.items(), 1):
            digest = hashlib.sha256(key.encode()).digest()
            salt = "" if share_prefixes else hashlib.sha256(b"salt" + digest).hexdigest()[:32]
            owner, is_gateway = f"key {number}", rights.tenant == GATEWAY
            tenant = owner if is_gateway or not rights.tenant else rights.tenant
            lasting = hashlib.sha256(b"lasting" + digest).hexdigest()[:32]
            client = Client(owner, tenant, salt, is_gateway, rights.max_priority, lasting)
            self._known.append((digest, client))

    @staticmethod
    def read(path: str) -> dict[str, Rights]:
        """Read keys and their rights from a file; raises ValueError.

        A line is `KEY [TENANT] [max_priority=N] # COMMENT`. Without `max_priority`, a key may ask for no
        priority above the usual 0, and a gateway may ask for any.
        """
        rights_of: dict[str, Rights] = {}
        try:
            text = read_bounded(Path(path), MOST_JSON_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is wrong; save it as UTF-8") from error
        except OSError as error:
            raise OSError(f"--api-keys {in_one_line(error)}") from error
        for number, line in enumerate(text.splitlines(), 1):
            words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
            if not words:
                continue
            try:
                key, rights = _line(words)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            if key in rights_of:
                raise ValueError(f"{path}:{number}: this key is listed twice; remove one line")
            rights_of[key] = rights
        if not rights_of:
            raise ValueError(f"{path} holds no key; write one a line")
        return rights_of

    @property
    def are_needed(self) -> bool:
        """Whether a request must have a key."""
        return bool(self._known)

    def of_lasting(self, lasting: str) -> Client | None:
        """Return the client with this `Client.lasting`, or None if its key is no longer accepted."""
        known = [client for _, client in self._known] or [ANYBODY]
        return next((each for each in known if each.lasting == lasting), None)

    def client(self, authorization: str | None) -> Client | None:
        """Return the client that sent this Authorization header, or None if unknown.

        The check takes the same time for every wrong key.
        """
        if not self._known:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = None
        for known, client in self._known:
            if hmac.compare_digest(known, digest):
                found = client
        return found if scheme.lower() == "bearer" else None


def _line(words: list[str]) -> tuple[str, Rights]:
    key, *more = words
    if not can_be_sent(key):
        raise ValueError("this key cannot be sent; it must be of printable ASCII")
    tenants = [each for each in more if not each.startswith(_PRIORITY)]
    bounds = [each.removeprefix(_PRIORITY) for each in more if each.startswith(_PRIORITY)]
    if len(tenants) > 1 or len(bounds) > 1:
        raise ValueError(f"a line is KEY [TENANT] [{_PRIORITY}N], and this has {len(words)} words")
    tenant = "".join(tenants)
    if not bounds:
        return key, Rights(tenant, None if tenant == GATEWAY else 0)
    priorities = integers(-LAST_ID, LAST_ID)
    if (bound := priorities.parse(bounds[0])) is None:
        raise ValueError(f"{_PRIORITY} must be {priorities}, not {abbreviate_json(bounds[0])}")
    return key, Rights(tenant, bound)
