"""Which keys does a recipe have for one engine over many devices?"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.keys import key

MOST_RANKS = 1024
LEADER_PORT = 29_400  # where ranks of other nodes join, unless a launcher names another


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """Over how many ranks, each a process with a device of its own, one engine is spread."""

    tensor: int = key(
        "ranks that share each layer: heads, inner size and vocabulary are divided among them",
        default=1,
        least=1,
        most=MOST_RANKS,
    )
    nodes: tuple[str, ...] | None = key(
        "addresses of the machines that hold the ranks, in equal numbers; the first leads; null: as the"
        " launcher says, or this machine alone",
        default=None,
    )
    connect_timeout_s: float = key(
        "how long the ranks may take to find each other", default=120.0, least=1, most=86_400
    )

    @property
    def ranks(self) -> int:
        """Of one engine, in all."""
        return self.tensor
