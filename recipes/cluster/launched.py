"""Tell scripts/launch.sh what it needs to know about the verb that it is to run.

    python -m recipes.cluster.launched [ARGUMENT ...]            the device's kind, this machine's number, and
                                                               what a machine that does not lead is to be told
    python -m recipes.cluster.launched --table [ARGUMENT ...]    where each rank is, and its environment

The arguments are those of the verb: its recipe and the keys that are changed are found among them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.cluster.cluster import Cluster, find_cluster
from recipes.cluster.rank_process import VISIBLE, named_devices, too_few
from recipes.schema import verb
from recipes.schema.command_line import positionals, profiles_in
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe

_CHANGE = re.compile(r"[A-Za-z_][\w.-]*=")


@dataclass(frozen=True, slots=True)
class Launched:
    """The recipe among a verb's arguments, loaded; None if there is none."""

    arguments: list[str]  # recipe, changes and profile
    recipe: Recipe | None

    @staticmethod
    def of(arguments: Sequence[str]) -> Launched:
        """Find the recipe; raises ValueError for one that cannot be used."""
        given = positionals(arguments)
        recipes = [each for each in given if each.endswith((".yaml", ".yml"))][:1]
        changes = [each for each in given if _CHANGE.match(each)]
        profile = [f"--profile={each}" for each in profiles_in(arguments)][-1:]
        if not recipes:
            return Launched([], None)
        name = profile[0].partition("=")[2] if profile else None
        return Launched([*recipes, *changes, *profile], load(recipes[0], changes, name))


def table(recipe: Recipe, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each rank: its machine, its device, and the environment that it alone has.

    The devices of this machine are those that the environment leaves visible; others count theirs from 0.
    Raises RecipeError where it names fewer devices than this machine has ranks.
    """
    kind, ranks = recipe.device.kind, recipe.parallel.ranks
    each = ranks // cluster.num_nodes
    is_given = kind in VISIBLE and not recipe.device.virtual  # a device for each rank
    named = named_devices(kind, environment) if is_given else None
    if named is not None and len(named) < each:
        raise too_few(kind, each, len(named))
    for node in range(cluster.num_nodes):
        for at, rank in enumerate(cluster.ranks_of(node, ranks)):
            where = "leads" if rank == 0 else f"follows {cluster.leader}:{cluster.port or 'any port'}"
            number = named[at].strip() if named is not None and node == cluster.node else str(at)
            device = f"{kind} {number}" if is_given else kind
            own = f"{VISIBLE[kind]}={number}" if is_given else ""
            if kind == "cpu":
                own = f"threads: {recipe.device.threads or f'cores / {each}'}"
            yield f"rank {rank}: machine {node} of {cluster.num_nodes}, {device}, {where}; {own}".rstrip("; ")


def main(argv: list[str]) -> None:
    """Print what was asked for; raises ValueError for a recipe, or a cluster, that cannot be used."""
    is_table, rest = argv[:1] == ["--table"], [each for each in argv if each != "--table"]
    asked = Launched.of(rest)
    recipe = asked.recipe
    cluster = Cluster("this machine") if recipe is None else find_cluster(recipe.parallel, os.environ)
    if is_table:
        if recipe is not None and recipe.parallel.ranks > 1:
            print(f"{recipe.parallel.ranks} ranks, placed by {cluster.source}")
            print("\n".join(table(recipe, cluster, os.environ)))
        return
    device = "cpu" if recipe is None else "virtual" if recipe.device.virtual else recipe.device.kind
    print("\n".join([device, str(cluster.node), *asked.arguments]))


if __name__ == "__main__":
    verb.run(main)
