"""Define the keys of `cache.tier`, and refuse values that are impossible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from borders.addresses import is_loopback
from recipes.schema.keys import key, keys_of
from recipes.schema.recipe_error import RecipeError, in_words, nearest

NAME = "cache.tier"
SCHEMES = ("redis", "rediss", "unix")
_PLACE = {"disk": "path", "redis": "url"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSection:
    """Where pages rest below the host's memory."""

    kind: Literal["disk", "redis"] = key("a folder, or a server")
    gib: float = key(
        "the most that all pages there take, those of other engines too", least=0.001, most=2**30
    )
    path: str | None = key("disk: the folder; relative to the repository", default=None)
    url: str | None = key("redis: the server, redis://HOST:PORT/DB, rediss:// or unix://PATH", default=None)
    password_file: str | None = key("redis: a file that holds the server's password", default=None)
    key_file: str | None = key(
        "a file of a secret of at least 32 bytes with which pages are signed; null: whoever can write to the"
        " store can change answers",
        default=None,
    )
    open: bool = key("redis: let the server be on another machine without key_file", default=False)
    wait_s: float = key("how long a request waits for its pages", default=0.5, least=0.001, most=60)


def tier_of(said: Mapping[str, Any] | None) -> TierSection | None:
    """Return the tier that a recipe asks for, if any; raises RecipeError for unusable keys and values."""
    if said is None:
        return None
    known = {each.name: each for each in keys_of(TierSection)}
    for name, value in said.items():
        if name not in known:
            fix = f"it has {', '.join(known)}{nearest(str(name), known)}"
            raise RecipeError((f"{NAME}.{name}", NAME), "unknown key", fix, value=value)
        try:
            known[name].check(value)
        except RecipeError as error:
            fix = f"it must be {known[name].allowed}"
            raise RecipeError((f"{NAME}.{name}", NAME), error.problem, fix, value=value) from None
    for name in ("kind", "gib"):
        if name not in said:
            fix = f"it must be {known[name].allowed}"
            raise RecipeError((f"{NAME}.{name}", NAME), "required, and missing", fix)
    return TierSection(**said)


def tier_contradictions(
    said: Mapping[str, Any] | None, *, is_sharing: bool, host_gib: float | None
) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.tier`, by itself and beside sharing and the host's memory."""
    try:
        tier = tier_of(said)
    except RecipeError as error:
        yield error
        return
    if tier is None:
        return
    yield from _places(tier)
    if not is_sharing:
        problem, fix = "no page can be found", "set cache.prefix_sharing to true, or leave this out"
        yield RecipeError((NAME, "cache.prefix_sharing"), problem, fix, value=said)
    if not host_gib:
        problem = "pages come from there by way of the host's memory, and cache.host_gib is not set"
        yield RecipeError((NAME, "cache.host_gib"), problem, "set it, or leave this out", value=said)


def _places(tier: TierSection) -> Iterator[RecipeError]:
    """Yield errors where a kind lacks its place, or has that of the other kind."""
    own = _PLACE[tier.kind]
    if getattr(tier, own) is None:
        yield RecipeError((f"{NAME}.{own}", NAME), f"required where {NAME}.kind is {tier.kind}, and missing")
    for kind, names in (("disk", ("path",)), ("redis", ("url", "password_file", "open"))):
        for name in names:
            if tier.kind != kind and getattr(tier, name) not in (None, False):
                problem = f"read only where {NAME}.kind is {kind}, and it is {tier.kind}"
                yield RecipeError(
                    (f"{NAME}.{name}", NAME), problem, "leave it out", value=getattr(tier, name)
                )
    if tier.url is None:
        return
    parts = urlsplit(tier.url)
    if parts.scheme not in SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        problem, fix = (
            f"{in_words(tier.url)} is not allowed",
            "it must be redis://HOST:PORT/DB or unix://PATH",
        )
        yield RecipeError((f"{NAME}.url", NAME), problem, fix, value=tier.url)
    elif parts.password is not None:
        problem, fix = "holds a password, which logs and recordings would show", f"use {NAME}.password_file"
        yield RecipeError((f"{NAME}.url", NAME), problem, fix)
    elif parts.scheme != "unix" and not (is_loopback(parts.hostname or "") or tier.key_file or tier.open):
        yield RecipeError(
            (f"{NAME}.key_file", NAME),
            f"{in_words(parts.hostname)} is another machine, and who can write there could change answers",
            f"let it name a secret with which pages are signed (openssl rand -hex 32), or set {NAME}.open to"
            " true where nobody else reaches that server",
            value=tier.url,
        )


def place_of(tier: TierSection, root: Path) -> Path:
    """Return the folder of a tier on disk."""
    assert tier.path is not None, "only a disk has a path"
    return root / Path(tier.path).expanduser()
