"""By which names may clients ask for the model?"""

from __future__ import annotations

from dataclasses import dataclass

from serving.api.errors import NotFound


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The name that the server goes by, in metrics for example, and the others that mean the same model."""

    name: str
    aliases: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name once, the server's own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def asked(self, name: str | None) -> str:
        """The name that an answer to a request has; raises NotFound for another model."""
        if name is None:
            return self.name
        if name not in self.all:
            raise NotFound.of_model(name, self.all)
        return name
