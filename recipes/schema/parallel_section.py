"""Define the keys of a recipe that spread one engine over many devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.schema.keys import key
from recipes.schema.recipe_error import RecipeError

MOST_RANKS = 1024
MOST_TOKENS = 2**20  # most tokens of a step
ALL_ADDRESSES = "all"  # the value that stands for every interface
LEADER_PORT = 29_400  # ranks of other nodes join at this port, unless a launcher names another


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """The ranks of one engine, each a process with a device of its own."""

    tensor: int = key(
        "ranks that share each layer: heads, inner size and vocabulary are divided among them",
        default=1,
        least=1,
        most=MOST_RANKS,
    )
    pipeline: int = key(
        "stages of consecutive layers, each of `parallel.tensor` ranks; as many batches are in flight",
        default=1,
        least=1,
        most=MOST_RANKS,
    )
    expert: int = key(
        "parts of the tensor ranks over which the whole experts of a mixture are spread; the ranks of a part"
        " divide its experts' inner size among them",
        default=1,
        least=1,
        most=MOST_RANKS,
    )
    context: int = key(
        "neighbouring tensor ranks that divide each page of the cache, where they would hold copies of it: of"
        " latents, or of a key-value head where there are fewer than ranks; the cache holds as many times the"
        " tokens",
        default=1,
        least=1,
        most=MOST_RANKS,
    )
    least_divided_tokens: int = key(
        "tokens of a step that is not a captured graph from which the tensor ranks divide its rows between"
        " products, with a reduce-scatter and an all-gather in place of each sum; 0: never",
        default=1024,
        least=0,
        most=MOST_TOKENS,
    )
    placement: Path | None = key(
        "a file of `scripts.place`: which experts lie on which rank; null: in the order of their numbers",
        default=None,
    )
    nodes: tuple[str, ...] | None = key(
        "addresses of the machines that hold the ranks, in equal numbers; the first leads; null: as the"
        " launcher says, or this machine alone",
        default=None,
    )
    interface: str | None = key(
        "the network interface at which the first machine lets the others join, and which the collectives of"
        " this machine use, such as eth0; all: any, for a network that nobody else reaches; null: the address"
        " by which the others find the first one; gloo takes the interface to it, and NCCL and HCCL choose."
        " On Ray, that of its network",
        default=None,
    )
    connect_timeout_s: float = key(
        "how long the ranks may take to find each other", default=120.0, least=1, most=86_400
    )
    start_timeout_s: float = key(
        "how long the ranks that have found each other may load, compile or capture without reporting"
        " progress, such as a percent more of their weights; from the first step server.step_timeout_s holds",
        default=1800.0,
        least=1,
        most=86_400,
    )

    @property
    def ranks(self) -> int:
        """The number of ranks of one engine."""
        return self.tensor * self.pipeline

    @property
    def ranks_of_a_machine(self) -> int:
        """The ranks that share a host's memory where a launcher names no machines."""
        names = self.nodes or ("",)
        return max(1, self.ranks // len(names)) * names.count(names[0])


def context_contradictions(section: ParallelSection, page_size: int) -> Iterator[RecipeError]:
    """Yield what contradicts pages of so many tokens that several ranks divide."""
    count = section.context
    if page_size % count:
        yield RecipeError(
            ("parallel.context", "cache.page_size"),
            f"cache.page_size is {page_size}, which it does not divide",
            f"set cache.page_size to a multiple of {count}",
            value=count,
        )


def placement_contradictions(section: ParallelSection) -> Iterator[RecipeError]:
    """Yield what contradicts the placement of experts."""
    if section.placement is not None and section.expert == 1:
        yield RecipeError(
            ("parallel.placement", "parallel.expert"),
            "parallel.expert is 1, so that every rank has a part of every expert",
            "set parallel.expert to the number of ranks that it was made for, or leave this out",
            value=section.placement,
        )
