"""Run scripts/launch.sh on as many nodes of a Ray cluster as an engine needs.

An actor on each node runs what a user would run there, with `NODE_RANK` and the addresses of all nodes; what
it prints is shown to whoever started the job. Ray places the nodes and ends the actors; ranks are started as
everywhere else.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from borders.addresses import is_loopback
from recipes.cluster.joining import address_by, address_of
from recipes.cluster.launched import Launched
from recipes.schema.command_line import with_keys
from recipes.schema.parallel_section import ALL_ADDRESSES
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError

RESOURCES = {"npu": "NPU", "cuda": "GPU"}  # Ray's resource by the kind of device
_THREADS = "OMP_NUM_THREADS"
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a submitted job
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_ENDS_IN_S = 10.0  # time for the other nodes to end after the leader has ended


@dataclass(frozen=True, slots=True)
class RayJob:
    """A verb of scripts/launch.sh, and the nodes with NPUs or GPUs that it runs on."""

    arguments: tuple[str, ...]
    num_nodes: int
    devices: dict[str, float]  # devices of each node, by Ray's resource names
    connect_timeout_s: float
    interface: str | None = None  # `parallel.interface`


def ray_job(num_nodes: int, arguments: list[str]) -> RayJob:
    """Return what is to run, and what it needs of each node; raises ValueError for an unusable recipe."""
    recipe = Launched.of(with_keys(arguments[1:], verb="".join(arguments[:1]))).recipe
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
    return RayJob(
        tuple(arguments), num_nodes, devices, recipe.parallel.connect_timeout_s, recipe.parallel.interface
    )


def node_address(interface: str | None) -> str:
    """Return the address under which the other nodes find this one; raises RecipeError.

    Ray's nodes find each other at Ray's own addresses, which need not be those of the default route.
    """
    if interface == ALL_ADDRESSES:
        import ray

        return str(ray.util.get_node_ip_address())
    return address_by(interface)


class LaunchActor:
    """An actor of Ray that runs the command on one node; the command ends with it."""

    def address(self, interface: str | None) -> str:
        """Return the address under which the other nodes find this one; raises RecipeError."""
        return node_address(interface)

    def run(
        self, arguments: Sequence[str], node: int, nodes: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        """Run the command, and return its exit status."""
        listed = f"parallel.nodes=[{','.join(nodes)}]"
        variables = {**environment, "NODE_RANK": str(node)}
        return started([*arguments, listed], variables, signal.SIGTERM).wait()


def started(
    arguments: Sequence[str], environment: Mapping[str, str], when_alone: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start scripts/launch.sh with these arguments.

    It gets the signal when the thread that started it ends, however that ends. The number of threads is of
    `environment` alone: Ray sets it to 1 in an actor, since that has a CPU.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    inherited = {name: value for name, value in os.environ.items() if name != _THREADS}
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "launch.sh"), *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(_END_WITH_PARENT, when_alone),
    )


def own_threads() -> dict[str, str]:
    """Return OMP_NUM_THREADS, if the user has set it for this process, for what it starts on other nodes.

    The command of a submitted job inherits the 1 of the actor that runs it, unless its runtime environment
    has another number, or a 1 that is the user's.
    """
    threads, job = os.environ.get(_THREADS), os.environ.get(_OF_A_JOB)
    asked = (json.loads(job or "{}").get("runtime_env") or {}).get("env_vars") or {}
    if threads is None or (threads == "1" and job is not None and _THREADS not in asked):
        return {}
    return {_THREADS: threads}


def check_reach(nodes: Sequence[Mapping[str, Any]], interface: str | None) -> None:
    """Raise RecipeError where others may reach Ray's ports, and the recipe does not say that this is meant.

    Whoever reaches them runs code there, by Ray's design, and some of them listen at every address.
    """
    addresses = sorted({str(each["NodeManagerAddress"]) for each in nodes if each["Alive"]})
    if all(map(is_loopback, addresses)):
        return
    if interface is None:
        raise RecipeError(
            "parallel.interface",
            f"whoever reaches Ray's ports at {', '.join(addresses[:4])} runs code there, and the recipe does"
            " not say that this network is meant",
            f"set it to the interface of that network, such as eth0, or to {ALL_ADDRESSES}, behind a firewall"
            " on every node: iptables -A INPUT -p tcp -m multiport --dports 6379,8265,10001:19999 ! -s"
            " NETWORK/24 -j DROP; on one machine, ray start --node-ip-address=127.0.0.1 needs neither",
        )
    if interface != ALL_ADDRESSES and (own := address_of(interface)) not in addresses:
        raise RecipeError(
            "parallel.interface",
            f"{interface} is {own}, and Ray's nodes are at {', '.join(addresses[:4])}",
            f"start this one by ray start --node-ip-address={own}, or name the interface that it uses",
            value=interface,
        )


@contextmanager
def connected(interface: str | None) -> Iterator[Any]:
    """Connect this process to its machine's Ray cluster.

    Raises RecipeError where there is none, or where others may reach it (see `check_reach`).
    """
    try:
        import ray
    except ImportError:
        raise RecipeError((), "Ray is not installed", "run bash scripts/setup.sh ray") from None
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except ConnectionError:
        raise RecipeError(
            (), "no Ray cluster runs on this machine", "start one with ray start, or set RAY_ADDRESS"
        ) from None
    try:
        check_reach(ray.nodes(), interface)
        yield ray
    finally:
        ray.shutdown()


def actors(ray: Any, kind: type, group: Any, devices: Mapping[str, float], num_nodes: int) -> list[Any]:
    """Return an actor in each bundle of a placement group, with all devices of the bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        ray.remote(kind)
        .options(
            num_cpus=1.0,
            num_gpus=devices.get("GPU", 0),
            resources={name: count for name, count in devices.items() if name != "GPU"},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at),
        )
        .remote()
        for at in range(num_nodes)
    ]


def run(job: RayJob, say: Callable[[str], None]) -> int:
    """Return the status of the leader's command; raises RecipeError without Ray or with too few resources."""
    with connected(job.interface) as ray:
        return _run(ray, job, say)


def _run(ray: Any, job: RayJob, say: Callable[[str], None]) -> int:
    from ray.util.placement_group import placement_group, remove_placement_group

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
        return _lead(ray, group, job, say)
    finally:
        remove_placement_group(group)  # this ends the actors, and the commands with them


def _lead(ray: Any, group: Any, job: RayJob, say: Callable[[str], None]) -> int:
    agents = actors(ray, LaunchActor, group, job.devices, job.num_nodes)
    try:
        nodes = ray.get([agent.address.remote(job.interface) for agent in agents])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # a node without this interface
    say(f"Ray has placed {job.num_nodes} nodes: {', '.join(nodes)}")
    threads = own_threads()
    ends = [agent.run.remote(job.arguments, node, nodes, threads) for node, agent in enumerate(agents)]
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
    if waiting:  # the others learn from the leader that it has ended in order
        ray.wait(waiting, num_returns=len(waiting), timeout=_ENDS_IN_S)
    return int(ray.get(ends[0]))


def _counted(there: dict[str, float], wanted: dict[str, float]) -> dict[str, float]:
    return {name: there.get(name, 0.0) for name in wanted}
