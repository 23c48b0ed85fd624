"""Define a recipe's keys for LoRA adapters of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.schema.keys import key
from recipes.schema.recipe_error import RecipeError

MOST_ADAPTERS, MOST_RANK = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersSection:
    """Adapters that requests may ask for by name in place of the model."""

    most: int = key(
        "how many the device has room for at once; 0: none, and the model computes as it did without",
        default=0,
        least=0,
        most=MOST_ADAPTERS,
    )
    rank: int = key("the rank that each has room for", default=16, least=1, most=MOST_RANK)
    folders: dict[str, Any] | None = key(
        "those that are there from the start: their names, and folders as peft saves them", default=None
    )
    root: Path | None = key(
        "adapters below this folder may be loaded while serving (POST /v1/load_lora_adapter); null: none",
        default=None,
    )


def adapter_contradictions(section: AdaptersSection) -> Iterator[RecipeError]:
    """Yield an error for values that contradict one another."""
    for name in ("folders", "root"):
        if not section.most and getattr(section, name):
            yield RecipeError(
                (f"adapters.{name}", "adapters.most"),
                "read only where adapters.most is set, and it is 0",
                "set it, or leave this out",
                value=getattr(section, name),
            )
    folders = section.folders or {}
    if len(folders) > section.most > 0:
        yield RecipeError(
            ("adapters.folders", "adapters.most"),
            f"names {len(folders)} adapters, and there is room for {section.most}",
            "raise adapters.most",
            value=folders,
        )
    if odd := [f"{name}: {folder}" for name, folder in folders.items() if not isinstance(folder, str)]:
        yield RecipeError(
            "adapters.folders", f"has {odd[0]}", "it must be the path of a folder", value=folders
        )
