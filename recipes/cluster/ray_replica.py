"""Run one replica in a Ray cluster: a server, on as many nodes as its engine needs.

An agent on each node, an actor of Ray, starts the scripts/launch.sh that a user would start there. When an
agent ends for any reason, the system ends what it has started; when any agent ends, the replica ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from borders.files import first_line
from recipes.cluster.ray_cluster import actors, node_address, own_threads, started

LOOPBACK = "127.0.0.1"  # the address on which scripts.serve listens by default
_LOOKS_S = 0.5
_SILENT_S = 15.0  # longest time for an agent to answer
_PATIENCE_S = 30.0  # time after which the log says that Ray has no room


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """What is started for each replica; `arguments` follow scripts/launch.sh serve."""

    arguments: tuple[str, ...]
    num_nodes: int
    devices: Mapping[str, float]  # devices of each node, by Ray's resource names
    host: str = LOOPBACK  # the address on which it listens
    has_events: bool = False  # it publishes page events, each replica on a port of its own
    interface: str | None = None  # `parallel.interface`
    is_encrypted: bool = False  # it speaks HTTPS

    def command(self, ports: Ports, nodes: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of scripts/launch.sh on every node, and the environment besides NODE_RANK."""
        options = ["serve", *self.arguments, "--host", self.host, "--port", str(ports.server)]
        if self.has_events:
            options.append(f"cache.events=tcp://{self.host}:{ports.events}")
        if len(nodes) > 1:
            options.append(f"parallel.nodes=[{','.join(nodes)}]")
        return options, {"MASTER_PORT": str(ports.ranks)} if len(nodes) > 1 else {}


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of the leading node that were free a moment ago; the port after `events` is free as well."""

    server: int
    ranks: int
    events: int

    @staticmethod
    def free() -> Ports:
        """Find free ports; raises OSError where there are none."""
        with contextlib.ExitStack() as held:

            def bound(port: int = 0) -> int:
                listener = held.enter_context(socket.create_server(("", port)))
                return int(listener.getsockname()[1])

            server, ranks = bound(), bound()
            for _ in range(100):
                events = bound()
                with contextlib.suppress(OSError, OverflowError):
                    bound(events + 1)
                    return Ports(server, ranks, events)
        raise OSError("no two neighbouring ports are free")


class ReplicaAgent:
    """An actor of Ray that holds a replica's share of one node; none of its methods waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def where(self, interface: str | None = None) -> tuple[str, Ports]:
        """Return the node's address, and ports that are free there; raises RecipeError."""
        return node_address(interface), Ports.free()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command.

        It is killed when this actor ends, so that its devices are free for the next one.
        """
        self._process = started(arguments, environment, signal.SIGKILL)

    def status(self) -> int | None:
        """Return the status with which it has ended, or None while it runs."""
        assert self._process is not None, "nothing was started"
        return self._process.poll()

    def stop(self) -> None:
        """Let it end when its requests have ended."""
        assert self._process is not None, "nothing was started"
        self._process.terminate()


class RayReplica:
    """A replica that was requested from Ray, for a `ReplicaSet`.

    The set only polls it; a thread waits for Ray.
    """

    def __init__(self, ray: Any, job: ReplicaJob, name: str, say: Callable[[str], None]) -> None:
        self.url: str | None = None
        self._why: str | None = None
        self._ray, self._job, self._name, self._say = ray, job, name, say
        self._is_stopped, self._is_killed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> str | None:
        """The reason why it has ended; None while it runs."""
        return self._why or (None if self._thread.is_alive() else "of a defect, which was printed")

    def stop(self) -> None:
        """Let it end when its requests have ended."""
        self._is_stopped.set()

    def kill(self) -> None:
        """End it now."""
        self._is_killed.set()

    def _run(self) -> None:
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": 1.0, **self._job.devices}
        try:
            group = placement_group([bundle] * self._job.num_nodes, strategy="STRICT_SPREAD")
            try:
                why = self._live(group, bundle)
            finally:
                remove_placement_group(group)  # this ends the agents, and with them what they hold
        except self._ray.exceptions.RayTaskError as error:
            why = str(error.cause)
        except self._ray.exceptions.RayError as error:
            why = first_line(error)
        self._why = why

    def _live(self, group: Any, bundle: dict[str, float]) -> str:
        waited_s = 0.0
        while not group.wait(1):
            waited_s += 1
            if self._is_over():
                return "it is not needed any more"
            if waited_s == _PATIENCE_S:
                self._say(f"{self._name} waits: Ray has no {self._job.num_nodes} nodes with {bundle} free")
        get, agents = (
            self._ray.get,
            actors(self._ray, ReplicaAgent, group, self._job.devices, self._job.num_nodes),
        )
        places = get([agent.where.remote(self._job.interface) for agent in agents])
        nodes = [address for address, _ in places]
        if self._job.host == LOOPBACK and {*nodes} != {node_address(self._job.interface)}:
            return f"{nodes[0]} is another machine, which nobody reaches at {LOOPBACK}; add --host 0.0.0.0"
        options, environment = self._job.command(places[0][1], nodes)
        environment |= own_threads()
        get(
            [
                agent.start.remote(options, environment | {"NODE_RANK": str(at)})
                for at, agent in enumerate(agents)
            ]
        )
        host = LOOPBACK if self._job.host == LOOPBACK else nodes[0]
        kind = "https" if self._job.is_encrypted else "http"
        self.url = f"{kind}://{host}:{places[0][1].server}"
        self._say(f"{self._name} starts at {self.url}, on {', '.join(nodes)}")
        return self._watch(agents)

    def _watch(self, agents: list[Any]) -> str:
        """Wait until the replica has ended, because of an agent or when asked to, and return the reason."""
        get, was_stopped = self._ray.get, False
        while True:
            statuses = get([agent.status.remote() for agent in agents], timeout=_SILENT_S)
            ends = [(at, status) for at, status in enumerate(statuses) if status is not None]
            if ends:
                at, status = ends[0]
                return "in order" if was_stopped else f"what ran on node {at} has ended with status {status}"
            if self._is_killed.is_set():
                return "it was killed"
            if self._is_stopped.is_set() and not was_stopped:
                was_stopped = True
                get(agents[0].stop.remote(), timeout=_SILENT_S)  # the other agents' commands follow it
            self._is_killed.wait(_LOOKS_S)

    def _is_over(self) -> bool:
        return self._is_stopped.is_set() or self._is_killed.is_set()
