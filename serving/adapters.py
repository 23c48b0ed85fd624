"""Keep the LoRA adapters that requests may ask for, by name.

The prefix-cache pages of an adapter's requests are salted with the digest of the adapter's files, so an
adapter that is loaded again under its old name from other files matches none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from borders.files import in_one_line
from borders.refusal import BadRequest, abbreviate_json
from models.checkpoint.adapter_files import AdapterFiles, look_at
from recipes.schema.adapters_section import AdaptersSection
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from serving.failures import Unavailable


@dataclass(slots=True)
class NamedAdapter:
    """An adapter: its name, and the number of the place that it has on the device."""

    name: str
    number: int
    files: AdapterFiles
    is_there: bool = True  # the adapter is loaded into its place

    def salted(self, salt: str) -> str:
        """Return the page salt of this adapter's requests, which keeps their pages apart from all others."""
        return f"{salt}:adapter:{self.files.digest}"


class KnownAdapters:
    """The adapters that a recipe names; raises RecipeError for one that cannot be used."""

    def __init__(self, section: AdaptersSection) -> None:
        self._by_name: dict[str, NamedAdapter] = {}
        self.most, self._rank = section.most, section.rank
        for number, (name, folder) in enumerate((section.folders or {}).items(), 1):
            try:
                files = look_at(ROOT / folder, section.rank)
            except (ValueError, OSError) as error:
                problem = in_one_line(error)
                raise RecipeError(
                    f"adapters.folders.{name}", problem, "correct it, or leave it out"
                ) from error
            self._by_name[name] = NamedAdapter(name, number, files)

    @property
    def all(self) -> Sequence[NamedAdapter]:
        return tuple(self._by_name.values())

    def knows(self, name: str) -> bool:
        """Return whether there is an adapter of this name."""
        return name in self._by_name

    def find(self, name: str) -> NamedAdapter:
        """Return the adapter of this name.

        Raises BadRequest if there is none, and Unavailable while it is being loaded.
        """
        found = self._by_name.get(name)
        if found is None:
            known = " or ".join(map(abbreviate_json, self._by_name)) or "left out: there are no adapters"
            raise BadRequest("adapter", value=name, limit=known)
        if not found.is_there:
            raise Unavailable(f"the adapter {name!r} is being loaded")
        return found


NO_ADAPTERS = KnownAdapters(AdaptersSection())
