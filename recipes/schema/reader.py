"""Read a recipe from YAML.

Values come, in rising precedence, from the base that the file names (if any), from the file, from the profile
that was asked for (if any), and from `key=value` overrides. A mistake is reported in one line that begins,
where possible, with where the key was set: file and line, profile, or command line.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from borders.files import read_bounded
from recipes.schema.foreign_keys import foreign_key
from recipes.schema.keys import NAMES, Key, hints_of, keys_of
from recipes.schema.precedence import BASE, COMMAND_LINE, FILE, PROFILE, Entry, settled
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError, in_words, in_yaml, nearest
from recipes.schema.source_location import Located, parse
from recipes.schema.speculation_section import unread

Section = TypeVar("Section")

log = logging.getLogger(__name__)

MOST_BYTES = 2**18  # most bytes of a recipe; YAML takes seconds for a megabyte
NO_RECIPE = "; give a recipe, such as recipes/tiny/cpu.yaml, or the folder of a checkpoint"
PROFILES = ROOT / "recipes/profiles"
KEYS = {each.name: each for each in keys_of(Recipe)}
# An override may set a single key of these
MAPPINGS = ("model.config", "model.config_overrides", "cache.tier")
WITH_NUMBERS = (*MAPPINGS, "scheduler.tenant_weights")  # a number in these may have an exponent
THERE = ", there "  # how the note of an entry begins that another engine's name has set
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML reads one only with a point and a sign
SECTIONS = {name.partition(".")[0] for name in KEYS}


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe, and an entry for every key that was set; the others have their default."""

    recipe: Recipe
    entries: Mapping[str, Entry]

    def origin(self, name: str) -> str:
        """Return where the value of a dotted key comes from."""
        return self.entries[name].origin if name in self.entries else "default"


def load(path: str | Path, overrides: Iterable[str] = (), profile: str | None = None) -> Recipe:
    """Return the recipe of a file; raises RecipeError."""
    return read(path, overrides, profile).recipe


def read(path: str | Path, overrides: Iterable[str] = (), profile: str | None = None) -> LoadedRecipe:
    """Return the recipe of a file, with the origin of its values; raises RecipeError.

    The keys of a profile, a name in `recipes/profiles`, replace the file's, and overrides replace both.
    """
    if isinstance(overrides, str):  # a text would be taken as an iterable of letters
        raise RecipeError((), f"the overrides are one text, {in_words(overrides)}", "give a list of texts")
    document, name = _document(Path(path)), str(path)
    entries: dict[str, Entry] = {}
    base = document.pop("base", None)
    if base is not None:
        base_path = _base_path(base, Path(path))
        inherited = _document(base_path, f"{name}:{base.line}: base: ")
        if "base" in inherited:
            raise RecipeError(
                "base",
                f"{path} is based on this recipe, and a base may have no base itself",
                "copy the keys",
                place=f"{base_path}:{inherited['base'].line}",
            )
        entries.update(_entries(inherited, str(base_path), BASE))
    entries.update(_entries(document, name, FILE))
    if profile is not None:
        entries.update(_profile(profile))
    for number, override in enumerate(overrides):
        _override(entries, override, number)
    return _loaded(settled(entries), name)


def overridden(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of the keys that overrides set, as a recipe has them; raises RecipeError."""
    entries: dict[str, Entry] = {}
    for number, override in enumerate(overrides):
        _override(entries, override, number)
    return {name: entry.value for name, entry in entries.items()}


def _document(path: Path, asked_by: str = "") -> dict[str, Located]:
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"not text in UTF-8 ({error.reason} at byte {error.start})"
        raise RecipeError((), problem, place=str(path)) from None
    except ValueError as error:
        raise RecipeError((), str(error), place=asked_by.rstrip(": ")) from None
    except OSError as error:
        problem = (error.strerror or "unreadable").lower() + _nearest_recipe(path)
        raise RecipeError((), problem, place=f"{asked_by}{path}") from None
    document = parse(text, str(path)).value or {}
    if not isinstance(document, dict):
        sections = ", ".join(sorted(SECTIONS))
        raise RecipeError((), "not a recipe", f"it must be a mapping of {sections}", place=str(path))
    return document


def _nearest_recipe(path: Path) -> str:
    """Return the suffix of an error about a missing recipe: a similar one, by its path from here."""
    there = {str(each.relative_to(ROOT)): each for each in ROOT.glob("recipes/**/*.yaml")}
    near = difflib.get_close_matches(str(path), there, n=1)
    if not near:
        return "" if path.suffix in (".yaml", ".yml") or path.exists() else NO_RECIPE
    from_here = os.path.relpath(there[near[0]])
    return f"; did you mean {there[near[0]] if from_here.startswith(os.pardir) else from_here}?"


def profiles() -> list[str]:
    """Return the names of all profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def _profile(name: str) -> dict[str, Entry]:
    if name not in profiles():
        names = ", ".join(profiles())
        raise RecipeError(
            (),
            "unknown profile",
            f"it must be {names}{nearest(name, profiles())}",
            value=name,
            limit=names,
            place=f"command line: --profile {name}",
        )
    return _entries(_document(PROFILES / f"{name}.yaml"), f"recipes/profiles/{name}.yaml", PROFILE)


def _base_path(base: Located, path: Path) -> Path:
    if not isinstance(base.value, str):
        problem = f"{in_words(base.plain)} is not the path of a recipe"
        raise RecipeError("base", problem, value=base.plain, place=f"{path}:{base.line}")
    return Path(os.path.normpath(path.parent / base.value))


def _entries(document: Mapping[str, Located], name: str, level: int) -> dict[str, Entry]:
    """Return the entries of the keys of one file."""
    entries: dict[str, Entry] = {}
    for section, located in document.items():
        place = f"{name}:{located.line}"
        if section not in SECTIONS and foreign_key(section):
            _take_foreign(entries, section, located, place, level)
            continue
        if section not in SECTIONS:
            if not any(foreign_key(_leaf(each)) for each, _ in _leaves(section, located)):
                raise _unknown(place, section)
            for each, value in _leaves(section, located):
                _take_foreign(entries, each, value, f"{name}:{value.line}", level)
            continue
        if not isinstance(located.value, (dict, type(None))):
            problem = f"{in_words(located.plain)} is not a mapping of the section's keys"
            raise RecipeError(section, problem, value=located.plain, place=place)
        for leaf, value in (located.value or {}).items():
            key, place = f"{section}.{leaf}", f"{name}:{value.line}"
            if key not in KEYS:
                _take_foreign(entries, key, value, place, level)
                continue
            _check_agreement(entries, key, new := Entry(_converted(KEYS[key], value, place), place, level))
            entries[key] = new
    return entries


def _leaves(name: str, located: Located) -> Iterator[tuple[str, Located]]:
    """Yield the dotted names of a section of another engine's recipe, down to known names and to values."""
    if not isinstance(located.value, dict) or foreign_key(_leaf(name)):
        yield name, located
        return
    for leaf, value in located.value.items():
        yield from _leaves(f"{name}.{leaf}", value)


def _take_foreign(
    entries: dict[str, Entry], name: str, located: Located, place: str, level: int, number: int = 0
) -> None:
    """Add the entry of our key for another engine's name; raises RecipeError where they differ in meaning."""
    foreign = foreign_key(leaf := _leaf(name))
    is_misplaced = name.partition(".")[0] in SECTIONS and any(_leaf(each) == leaf for each in KEYS)
    if foreign is None or is_misplaced:
        raise _unknown(place, name)
    key = foreign.key_of(leaf.replace("-", "_"))
    if key is None or not foreign.same:
        problem, fix = foreign.refusal(leaf.replace("-", "_"))
        raise RecipeError(name, problem, fix, value=located.plain, place=place)
    if foreign.same == "opposite" and isinstance(located.value, bool):
        located = Located(not located.value, located.line)
    value = _converted(KEYS[key], located, place)
    new = Entry(value, place, level, number, f"{THERE}{leaf}")
    _check_agreement(entries, key, new)
    log.warning("%s: %s is taken as %s=%s", place, leaf, key, in_yaml(value))
    entries[key] = new


def _check_agreement(entries: Mapping[str, Entry], key: str, new: Entry) -> None:
    """Raise RecipeError where one place gives a key two values, of which one has another engine's name."""
    old = entries.get(key)
    if old is None or old.level != new.level or old.value == new.value or new.level == COMMAND_LINE:
        return
    if isinstance(new.value, RecipeError):
        raise new.value
    raise RecipeError(
        key,
        f"{in_words(new.value)} here{new.note}, and {in_words(old.value)} at {old.origin}",
        "leave one of them out",
        value=new.value,
        place=new.place,
    )


def _override(entries: dict[str, Entry], override: str, number: int) -> None:
    place = f"command line: {override if len(override) <= 60 else override[:57] + '...'}"
    name, equals, text = override.partition("=")
    if not equals:
        is_folder = Path(override).expanduser().is_dir()
        fix = f"give model.path={override}, or the folder alone in place of the recipe" if is_folder else ""
        raise RecipeError((), "an override reads key=value, as in cache.page_size=32", fix, place=place)
    located = parse(text, place, numbered=False)
    parts = name.split(".", 2)
    key = KEYS.get(".".join(parts[:2]))
    if key is None or len(parts) == 3 or key.kind in (Path, str):
        located = _whole(located, text)
    if name in SECTIONS:
        example = next(each for each in KEYS if each.startswith(f"{name}."))
        raise RecipeError(
            (), f"{name} is a section", f"set one of its keys, as in {example}=...", place=place
        )
    if key is None and foreign_key(_leaf(name)):
        _take_foreign(entries, name, located, place, COMMAND_LINE, number)
        return
    if key is None or (len(parts) == 3 and key.name not in MAPPINGS):
        raise _unknown(place, name)
    if len(parts) == 3:
        known = entries[key.name].value if key.name in entries else None
        value: Any = {**(known or {}), parts[2]: _with_numbers(located.plain)}
    else:
        value = _converted(key, located, place)
    entries[key.name] = Entry(value, place, COMMAND_LINE, number)


def _whole(located: Located, text: str) -> Located:
    """Return the value of an override with what YAML takes for a comment: a path may have ' #' in it."""
    text, value = text.strip(), located.plain
    if value is None:
        is_cut = text.startswith("#")
    else:
        is_cut = isinstance(value, str) and re.match(r"\s+#", text.removeprefix(value)) is not None
    return Located(text, located.line) if is_cut else located


def _converted(key: Key, located: Located, place: str) -> Any:
    """Return the value as the key's type."""
    value = located.plain
    if key.kind is Path and isinstance(value, str):
        try:
            return _path(value, key.name, place)
        except RecipeError as error:
            return error  # It is raised by `_loaded`, unless a later value replaces it
    if key.kind == NAMES and isinstance(value, list):
        value = tuple(value)
    if isinstance(value, int) and str(value) in key.choices:  # YAML reads the product 950 as a number
        value = str(value)
    if isinstance(value, str):
        value = dict(key.elsewhere).get(value, value)
    if key.kind is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        assert key.range is not None, "a number has one"
        number = key.range.parse(value)
        value = value if number is None else number
    if key.name in WITH_NUMBERS:
        value = _with_numbers(value)
    try:
        key.check(value)
    except RecipeError as error:
        raise error.at(place) from None
    return float(value) if key.kind is float and value is not None else value


def _with_numbers(value: Any) -> Any:
    """Return a value with the numbers in it that YAML takes for texts: 1e6, and 1e-06 as JSON writes it."""
    if isinstance(value, dict):
        return {name: _with_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    is_number = isinstance(value, str) and _EXPONENT.fullmatch(value) and math.isfinite(float(value))
    return float(value) if is_number else value


def _path(text: str, key: str, place: str) -> Path:
    """Return an absolute path: `${NAME}` comes from the environment, `~` is the home directory.

    Other paths are relative to the repository.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            problem = f"{match[0]} is not set in the environment"
            fix = f"export {match[1]}=FOLDER, or write the path out, as in {key}=FOLDER"
            raise RecipeError(key, problem, fix, value=text, place=place)
        return os.environ[match[1]]

    return ROOT / os.path.expanduser(re.sub(r"\$\{(\w+)\}", replace, text))


def _loaded(entries: Mapping[str, Entry], name: str) -> LoadedRecipe:
    for entry in entries.values():
        if isinstance(entry.value, RecipeError):
            raise entry.value
    for key in KEYS.values():
        if key.default is MISSING and key.name not in entries:
            fix = f"it must be {key.allowed}"
            raise RecipeError(key.name, "required, and missing", fix, limit=key.allowed, place=name)
    try:
        recipe = made(Recipe, {name: entry.value for name, entry in entries.items()})
        _check_guesses(recipe, entries)
    except RecipeError as error:
        raise placed(error, entries, name) from None
    for key_name, entry in entries.items():
        if entry.note:
            log.info("%s: %s", key_name, entry.origin)
    return LoadedRecipe(recipe, entries)


def _check_guesses(recipe: Recipe, entries: Mapping[str, Entry]) -> None:
    """Raise RecipeError for another engine's number of guesses, even our default, where nobody guesses."""
    name, kind = "speculation.max_tokens", entries.get("speculation.kind")
    asked = entries.get(name)
    if recipe.speculation.kind != "none" or asked is None or not asked.note.startswith(THERE):
        return
    if kind is None or asked.level >= kind.level:
        raise unread("max_tokens", "none", asked.value)


def placed(error: RecipeError, entries: Mapping[str, Entry], name: str) -> RecipeError:
    """Return the error at the place where the last of its keys was set, or else at the file's name."""
    found = [entries[key] for key in error.keys if key in entries]
    return error.at(max(found, key=lambda entry: (entry.level, entry.number)).place if found else name)


def made(section: type[Section], values: Mapping[str, Any], prefix: str = "") -> Section:
    """Return the dataclass filled from dotted keys, and the dataclasses in it."""
    arguments: dict[str, Any] = {}
    for name, hint in hints_of(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            arguments[name] = made(hint, values, f"{prefix}{name}.")
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return section(**arguments)


def _unknown(place: str, name: str) -> RecipeError:
    leaf = _leaf(name)
    same_leaf = [key for key in KEYS if key.endswith(f".{leaf}")]
    near = (
        f"; did you mean {same_leaf[0]}?"
        if same_leaf
        else nearest(name, _alike(leaf) if "." in name else [*KEYS, *SECTIONS, "base"])
    )
    return RecipeError(
        name, "unknown key", near.removeprefix("; ") or "python -m recipes keys lists them", place=place
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _alike(leaf: str) -> list[str]:
    """Return the keys that resemble this one when their sections are ignored.

    An equal section would make any two names alike.
    """
    near = difflib.get_close_matches(leaf, {_leaf(key) for key in KEYS}, n=len(KEYS))
    return [key for key in KEYS if _leaf(key) in near]
