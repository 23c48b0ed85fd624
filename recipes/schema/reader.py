"""How does a YAML file become a recipe?

From a base, if the file names one, the file, a profile, if one is asked for, and `key=value` overrides, each
replacing what came before.
Every error is one line that opens with the place of the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from recipes.schema.keys import Key, RecipeError, in_words, keys_of, nearest
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.source_location import Located, parse

Section = TypeVar("Section")

PROFILES = ROOT / "recipes/profiles"
KEYS = {each.name: each for each in keys_of(Recipe)}
SECTIONS = {name.partition(".")[0] for name in KEYS}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and where it was said; of two entries the one of the higher rank holds."""

    value: Any
    place: str  # recipes/tiny/cpu.yaml:7, or command line: cache.page_size=32
    rank: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A recipe, and an entry for every key that was said; the others are at their default."""

    recipe: Recipe
    entries: Mapping[str, Entry]

    def origin(self, name: str) -> str:
        """Where the value of a dotted key comes from."""
        return self.entries[name].place if name in self.entries else "default"


def load(path: str | Path, overrides: Iterable[str] = (), profile: str | None = None) -> Recipe:
    """The recipe of a file; raises RecipeError."""
    return read(path, overrides, profile).recipe


def read(path: str | Path, overrides: Iterable[str] = (), profile: str | None = None) -> Reading:
    """The recipe of a file, with the origin of its values; raises RecipeError.

    The keys of a profile, a name in `recipes/profiles`, replace the file's, and overrides replace both.
    """
    document, name = _document(Path(path)), str(path)
    entries: dict[str, Entry] = {}
    base = document.pop("base", None)
    if base is not None:
        base_path = _base_path(base, Path(path))
        inherited = _document(base_path, f"{name}:{base.line}: base: ")
        if "base" in inherited:
            raise RecipeError(
                f"{base_path}:{inherited['base'].line}: base: {path} is based on this recipe, and a base"
                " may have no base itself; copy the keys"
            )
        entries.update(_entries(inherited, str(base_path), rank=0))
    entries.update(_entries(document, name, rank=1))
    if profile is not None:
        entries.update(_profile(profile))
    for rank, override in enumerate(overrides, start=3):
        _override(entries, override, rank)
    return _reading(entries, name)


def _document(path: Path, asked_by: str = "") -> dict[str, Located]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        near = nearest(str(path), [str(each.relative_to(ROOT)) for each in ROOT.glob("recipes/**/*.yaml")])
        raise RecipeError(f"{asked_by}{path}: {(error.strerror or 'unreadable').lower()}{near}") from None
    document = parse(text, str(path)).value or {}
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: not a recipe; it must be a mapping of {', '.join(sorted(SECTIONS))}")
    return document


def profiles() -> list[str]:
    """The names of all profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def _profile(name: str) -> dict[str, Entry]:
    if name not in profiles():
        raise RecipeError(
            f"command line: --profile {name}: unknown profile; it must be {', '.join(profiles())}"
            f"{nearest(name, profiles())}"
        )
    return _entries(_document(PROFILES / f"{name}.yaml"), f"recipes/profiles/{name}.yaml", rank=2)


def _base_path(base: Located, path: Path) -> Path:
    if not isinstance(base.value, str):
        raise RecipeError(f"{path}:{base.line}: base: {in_words(base.plain)} is not the path of a recipe")
    return Path(os.path.normpath(path.parent / base.value))


def _entries(document: Mapping[str, Located], name: str, rank: int) -> dict[str, Entry]:
    """The keys of one file."""
    entries = {}
    for section, located in document.items():
        place = f"{name}:{located.line}"
        if section not in SECTIONS:
            raise _unknown(place, section)
        if not isinstance(located.value, (dict, type(None))):
            raise RecipeError(
                f"{place}: {section}: {in_words(located.plain)} is not a mapping of the section's keys"
            )
        for leaf, value in (located.value or {}).items():
            key, place = f"{section}.{leaf}", f"{name}:{value.line}"
            if key not in KEYS:
                raise _unknown(place, key)
            entries[key] = Entry(_converted(KEYS[key], value, place), place, rank)
    return entries


def _override(entries: dict[str, Entry], override: str, rank: int) -> None:
    place = f"command line: {override if len(override) <= 60 else override[:57] + '...'}"
    name, equals, text = override.partition("=")
    if not equals:
        raise RecipeError(f"{place}: an override reads key=value, as in cache.page_size=32")
    located = parse(text, place, numbered=False)
    parts = name.split(".", 2)
    key = KEYS.get(".".join(parts[:2]))
    if name in SECTIONS:
        example = next(each for each in KEYS if each.startswith(f"{name}."))
        raise RecipeError(f"{place}: {name} is a section; set one of its keys, as in {example}=...")
    if key is None or (len(parts) == 3 and key.name != "model.config"):
        raise _unknown(place, name)
    if len(parts) == 3:  # one key of a config.json
        known = entries[key.name].value if key.name in entries else None
        value: Any = {**(known or {}), parts[2]: located.plain}
    else:
        value = _converted(key, located, place)
    entries[key.name] = Entry(value, place, rank)


def _converted(key: Key, located: Located, place: str) -> Any:
    """The value as the key's type."""
    value = located.plain
    if key.kind is Path and isinstance(value, str):
        return _path(value, f"{place}: {key.name}")
    if isinstance(value, int) and str(value) in key.choices:  # the product 950 is to YAML a number
        value = str(value)
    try:
        key.check(value)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}", key.name) from None
    return float(value) if key.kind is float and value is not None else value


def _path(text: str, place: str) -> Path:
    """An absolute path: `${NAME}` from the environment, `~` the home, else relative to the repository."""

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise RecipeError(
                f"{place}: {match[0]} is not set in the environment; set it, or write the path out"
            )
        return os.environ[match[1]]

    return ROOT / os.path.expanduser(re.sub(r"\$\{(\w+)\}", replace, text))


def _reading(entries: Mapping[str, Entry], name: str) -> Reading:
    for key in KEYS.values():
        if key.default is MISSING and key.name not in entries:
            raise RecipeError(f"{name}: {key.name}: required, and missing; it must be {key.allowed}")
    try:
        recipe = _made(Recipe, {name: entry.value for name, entry in entries.items()})
    except RecipeError as error:
        raise placed(error, entries, name) from None
    return Reading(recipe, entries)


def placed(error: RecipeError, entries: Mapping[str, Entry], name: str) -> RecipeError:
    """The error with the place in front where the last word was said on its keys, or else the file's name."""
    said = [entries[key] for key in error.keys if key in entries]
    place = max(said, key=lambda entry: entry.rank).place if said else name
    return RecipeError(f"{place}: {error}", *error.keys)


def _made(section: type[Section], values: Mapping[str, Any], prefix: str = "") -> Section:
    """The dataclass filled from dotted keys, and the dataclasses in it."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            arguments[name] = _made(hint, values, f"{prefix}{name}.")
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return section(**arguments)


def _unknown(place: str, name: str) -> RecipeError:
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in KEYS if key.endswith(f".{leaf}")]
    near = (
        f"; did you mean {same_leaf[0]}?"
        if same_leaf
        else nearest(name, KEYS if "." in name else [*KEYS, *SECTIONS, "base"])
    )
    return RecipeError(f"{place}: {name}: unknown key{near or '; python -m recipes keys lists them'}")
