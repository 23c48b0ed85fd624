"""How does a Ray cluster start an engine that spans several of its nodes?

    python -m scripts.on_ray --nodes 2 serve RECIPE parallel.tensor=16

It runs scripts/launch.sh with these arguments on as many nodes of the cluster that this machine belongs to,
each with its share of the ranks' devices, and prints what they print. Every node needs this directory under
the same path. See docs/cluster.md.
"""

from __future__ import annotations

import argparse
import sys

from recipes.build.launched import Launched
from recipes.build.ray_cluster import RayJob, run
from recipes.schema import verb
from recipes.schema.numbers import whole
from recipes.schema.recipe_error import RecipeError

RESOURCES = {"npu": "NPU", "cuda": "GPU"}  # of a device kind, as Ray names it


def main(argv: list[str]) -> int:
    """The status of the verb on the node that leads."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.on_ray", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=whole(1, 1024), required=True, metavar="N", help="machines to run on")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="VERB ARGUMENT ...")
    options = parser.parse_args(argv)
    return run(job(options.nodes, options.arguments), lambda line: print(line, file=sys.stderr, flush=True))


def job(num_nodes: int, arguments: list[str]) -> RayJob:
    """What is to run, and what it needs of each node; raises ValueError for a recipe that cannot be."""
    recipe = Launched.of(arguments[1:]).recipe
    if recipe is None:
        raise RecipeError((), "no recipe is among the arguments", "say VERB RECIPE, as in serve RECIPE")
    if recipe.parallel.nodes is not None:
        raise RecipeError(
            "parallel.nodes", "Ray chooses the nodes", "leave it out", value=recipe.parallel.nodes
        )
    ranks = recipe.parallel.ranks
    if ranks % num_nodes:
        raise RecipeError(
            "parallel.tensor",
            f"{ranks} ranks cannot be shared evenly by {num_nodes} nodes",
            f"make them a multiple of {num_nodes}",
            value=ranks,
        )
    kind = recipe.device.kind
    is_device = kind in RESOURCES and not recipe.device.virtual
    devices = {RESOURCES[kind]: float(ranks // num_nodes)} if is_device else {}
    return RayJob(tuple(arguments), num_nodes, devices, recipe.parallel.connect_timeout_s)


if __name__ == "__main__":
    verb.run(main)
