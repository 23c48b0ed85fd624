"""Run an engine that spans several nodes of a Ray cluster, or replicas of a server.

    python -m scripts.on_ray --nodes 2 serve RECIPE parallel.tensor=16
    python -m scripts.on_ray --replicas 2:4 --router http://127.0.0.1:8080 serve RECIPE

The first runs scripts/launch.sh with these arguments on as many nodes of the cluster that this machine
belongs to, each with its share of the ranks' devices, and prints what they print. The second keeps from 2 to
4 such servers, by the prompt tokens that wait, and announces them to a scripts.route. Every node needs this
directory under the same path. See docs/cluster.md and docs/fleet.md.
"""

from __future__ import annotations

import argparse
import sys

from continuous_batching.routing.scaling import MOST_REPLICAS, ScalingBounds
from recipes.cluster import ray_cluster, ray_fleet
from recipes.cluster.ray_cluster import ray_job
from recipes.cluster.ray_fleet import RayFleet
from recipes.cluster.ray_replica import ReplicaJob
from recipes.schema import verb
from recipes.schema.command_line import with_keys
from recipes.schema.numbers import real, span, whole
from recipes.schema.reader import load
from scripts import serve


def main(argv: list[str]) -> int:
    """Return the status of the verb on the leading node, or 0 where replicas have ended in order."""
    options = parser().parse_args(argv)
    if options.replicas is not None:
        return ray_fleet.serve(fleet(options), _say)
    return ray_cluster.run(ray_job(options.nodes, options.arguments), _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.on_ray", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, seconds, tokens = top.add_argument, real(0, 86_400), whole(1, 2**31)
    add("--nodes", type=whole(1, 1024), default=1, metavar="N", help="machines for each engine")
    add("--replicas", type=span(1, MOST_REPLICAS), metavar="LEAST:MOST", help="servers, by what waits")
    add("--router", default="http://127.0.0.1:8080", metavar="URL", help="scripts.route, to be told")
    add("--queued-tokens", type=tokens, default=4096, metavar="N", help="one more if more wait for each")
    add("--more-after-s", type=seconds, default=5.0, metavar="S", help="and have for so long")
    add("--fewer-after-s", type=seconds, default=120.0, metavar="S", help="one fewer after so long with room")
    add("--drain-s", type=seconds, default=600.0, metavar="S", help="for requests of one that is to go")
    add("arguments", nargs=argparse.REMAINDER, metavar="VERB ARGUMENT ...")
    return top


def fleet(options: argparse.Namespace) -> RayFleet:
    """Return the fleet to run; raises ValueError for one that cannot run."""
    verb_, *arguments = options.arguments or [""]
    if verb_ != "serve":
        raise ValueError(f"--replicas are servers, and the verb is {verb_!r}; say serve RECIPE")
    asked = ray_job(options.nodes, options.arguments)
    served = serve.parser().parse_intermixed_args(with_keys(arguments))
    if served.port != serve.parser().get_default("port"):
        raise ValueError(f"--port is {served.port}, and each replica has a port of its own; leave it out")
    recipe = load(served.recipe, served.overrides, served.profile)
    replica = ReplicaJob(
        tuple(arguments),
        asked.num_nodes,
        asked.devices,
        served.host,
        recipe.cache.events is not None,
        asked.interface,
        served.tls_certificate is not None,
    )
    least, most = options.replicas
    scaling = ScalingBounds(
        least,
        most,
        queued_tokens=options.queued_tokens,
        more_after_s=options.more_after_s,
        fewer_after_s=options.fewer_after_s,
        slots=recipe.scheduler.num_slots,
    )
    return RayFleet(replica, scaling, options.router, options.drain_s, recipe.server.drain_s)


if __name__ == "__main__":
    verb.run(main)
