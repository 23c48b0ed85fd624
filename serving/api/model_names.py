"""Define the names by which clients may ask for the model and its adapters."""

from __future__ import annotations

from dataclasses import dataclass

from serving.adapters import KnownAdapters
from serving.api.errors import NotFound


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The server's own name (used in metrics), its aliases for the same model, and the model's adapters."""

    name: str
    aliases: tuple[str, ...]
    adapters: KnownAdapters

    @property
    def all(self) -> tuple[str, ...]:
        """Every name once: the server's own first, adapters last."""
        return tuple(dict.fromkeys((*self.of_model, *(each.name for each in self.adapters.all))))

    @property
    def of_model(self) -> tuple[str, ...]:
        """The names that mean the model itself."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def asked(self, name: str | None) -> str:
        """Return the name that an answer to a request carries; raises NotFound for another model."""
        if name is None:
            return self.name
        if name not in self.all:
            raise NotFound.of_model(name, self.all)
        return name
