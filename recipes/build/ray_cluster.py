"""How does a Ray cluster start scripts/launch.sh on as many of its nodes as an engine needs?

An actor on each node runs what a user would run there, with `NODE_RANK` and the addresses of all; what it
prints comes to whoever asked. Ray places the nodes and ends the actors; ranks are started as everywhere else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.build.cluster import own_address
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError

_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_ENDS_IN_S = 10.0  # for the other nodes, when the leader has ended


@dataclass(frozen=True, slots=True)
class RayJob:
    """A verb of scripts/launch.sh, on so many nodes with so many NPUs or GPUs each."""

    arguments: tuple[str, ...]
    num_nodes: int
    devices: dict[str, float]  # of a node, as Ray names them
    connect_timeout_s: float


class LaunchActor:
    """Runs the command on one node; an actor of Ray, whose end is that of the command."""

    def address(self) -> str:
        """Under which the other nodes find this one."""
        return own_address()

    def run(self, arguments: Sequence[str], node: int, nodes: Sequence[str]) -> int:
        """The status with which the command ends."""
        listed = f"parallel.nodes=[{','.join(nodes)}]"
        command = ["bash", str(ROOT / "scripts" / "launch.sh"), *arguments, listed]
        environment = os.environ | {"NODE_RANK": str(node)}
        libc = ctypes.CDLL(None, use_errno=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(_END_WITH_PARENT, signal.SIGTERM),
        )
        return process.wait()


def run(job: RayJob, say: Callable[[str], None]) -> int:
    """The status of the leader's command; raises RecipeError where there is no Ray, or too little of it."""
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ImportError:
        raise RecipeError((), "Ray is not installed", "run bash scripts/setup.sh ray") from None
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except ConnectionError:
        raise RecipeError(
            (), "no Ray cluster runs on this machine", "start one with ray start, or set RAY_ADDRESS"
        ) from None
    bundle = {"CPU": 1.0, **job.devices}
    group = placement_group([bundle] * job.num_nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(job.connect_timeout_s):
            there = [each["Resources"] for each in ray.nodes() if each["Alive"]]
            raise RecipeError(
                "parallel.connect_timeout_s",
                f"Ray found no {job.num_nodes} nodes with {bundle} each in {job.connect_timeout_s:g} s;"
                f" its {len(there)} nodes have {[_counted(each, bundle) for each in there]}",
                "start ray on more of them, free what others hold, or lower parallel.tensor",
            )
        return _lead(ray, group, job, bundle, say)
    finally:
        remove_placement_group(group)  # ends the actors, and the commands with them
        ray.shutdown()


def _lead(ray: Any, group: Any, job: RayJob, bundle: dict[str, float], say: Callable[[str], None]) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = {name: count for name, count in job.devices.items() if name != "GPU"}
    actors = [
        ray.remote(LaunchActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=job.devices.get("GPU", 0),
            resources=resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at),
        )
        .remote()
        for at in range(job.num_nodes)
    ]
    nodes = ray.get([actor.address.remote() for actor in actors])
    say(f"Ray has placed {job.num_nodes} nodes: {', '.join(nodes)}")
    ends = [actor.run.remote(job.arguments, node, nodes) for node, actor in enumerate(actors)]
    waiting = list(ends)
    while ends[0] in waiting:
        (done,), waiting = ray.wait(waiting)
        node = ends.index(done)
        try:
            status = ray.get(done)
        except ray.exceptions.RayActorError as error:
            raise OSError(f"node {node} ({nodes[node]}) is lost: {error}") from error
        if node and status:
            raise OSError(f"node {node} ({nodes[node]}) has ended with status {status}; see what it printed")
    if waiting:  # the others hear from the leader that it has ended in order
        ray.wait(waiting, num_returns=len(waiting), timeout=_ENDS_IN_S)
    return int(ray.get(ends[0]))


def _counted(there: dict[str, float], wanted: dict[str, float]) -> dict[str, float]:
    return {name: there.get(name, 0.0) for name in wanted}
