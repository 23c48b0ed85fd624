"""Hold a further machine's ranks of an engine.

    python -m scripts.follow RECIPE [key=value ...]

The command is started on every machine but the first, where a verb such as scripts.serve leads;
scripts/launch.sh starts the right one of the two. Which machine this is comes from `parallel.nodes`, or from
the launcher: see docs/cluster.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from recipes.cluster.cluster import find_cluster
from recipes.fitting import with_recipe
from recipes.schema import verb
from recipes.schema.command_line import add_recipe
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError


def main(argv: list[str]) -> int:
    """Hold the ranks until the leader closes its engine, and return 0 then."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.follow", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_recipe(parser)
    asked = parser.parse_intermixed_args(with_recipe("scripts.follow", argv))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    recipe = load(asked.recipe, asked.overrides, asked.profile)
    cluster = find_cluster(recipe.parallel, os.environ)
    if cluster.node == 0:
        raise RecipeError(
            "parallel.nodes",
            f"this machine is the first of {cluster.num_nodes} ({cluster.source}), which leads",
            "start a verb here, such as scripts.serve, and scripts.follow on the others",
        )
    from recipes.cluster.node import hold  # imported here because it imports torch, which takes a second

    return hold(recipe, cluster)


if __name__ == "__main__":
    verb.run(main)
