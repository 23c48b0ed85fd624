"""Bring the ranks of an engine together, as the rank that leads them does, and end it when one is lost.

The leader is rank 0. The other ranks of its machine are its children; all join through its store, and then
follow its recording. Nothing can be computed without a rank, so the leader ends when any of them is lost.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from borders.addresses import is_loopback
from borders.refusal import one_line
from borders.shared_secret import new_secret
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Runner
from continuous_batching.recording.agreement import Agreement
from continuous_batching.recording.listeners import Listeners, RankLost
from devices.cpu_threads import USUAL_THREADS
from devices.hccl_errors import end_of_log, explained
from devices.host_limits import usable_cores
from kv_cache.pages import PageCopy
from models.parallel.group import BACKENDS, Group, join
from recipes.cluster.cluster import Cluster, hide_rank_table, ranks_here
from recipes.cluster.joining import (
    Joining,
    address_of_recording,
    bound,
    interface_to,
    leader_address,
    tell_libraries,
)
from recipes.cluster.rank_process import (
    GATHERED,
    RANKS_HERE,
    RECIPE,
    RECORDING,
    SECRET,
    WAIT_S,
    RankProcess,
    SpareRanks,
    common,
    named_devices,
    too_few,
)
from recipes.machine import num_devices, start
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)

LOST = 70  # the status of a process that ends because a rank is lost
# A rank's silence and a step may last this long, unless server.step_timeout_s says otherwise.
SHORTEST_LIMIT_S = 20.0
LARGEST_STEPS = 5  # a step may take this multiple of the largest step that was measured
_GRACE_S = 2.0  # time for a step to notice that a rank is lost, and for ranks to end by themselves
_LOOKS_S = 0.1  # interval between checks whether a rank has ended instead of joining
_LOSS_NEWS_S = 1.0  # time from a failed collective to the news of the lost rank


class Ranks:
    """All ranks of an engine, as rank 0 sees them; see `models/parallel/group.py` for `group`.

    The object is a sink of the engine's recording. When a rank is lost, the others are ended, and a step
    raises RankLost; a step that cannot, since it waits for the lost rank, ends the process with status LOST.
    With `ends_process`, an idle process is ended likewise. `spares` become ranks of this machine.
    """

    def __init__(self, recipe: Recipe, cluster: Cluster, spares: SpareRanks | None = None) -> None:
        self.ends_process = False
        self._is_building = True
        self._processes: list[RankProcess] = []
        fixed_s, start_limit_s = recipe.server.step_timeout_s, recipe.parallel.start_timeout_s
        self._limit_s = fixed_s or SHORTEST_LIMIT_S
        self._follows_steps = fixed_s is None
        # A collective waits for ranks that still load or compile. The listeners end a step that takes too
        # long, so nothing needs a shorter limit of its own.
        self.wait_s = max(start_limit_s, self._limit_s)
        stay_near(cluster, recipe.parallel.interface)
        start(recipe.device)  # it imports the library of the collectives
        try:
            store, connections = self._gathered(recipe, cluster, spares or SpareRanks(0))
            self._listeners = Listeners(connections, self._limit_s, self._lost, start_limit_s)
            self._end = weakref.finalize(self, _close, self._processes, self._listeners)
            with watched(self._listeners):
                self.group = joined(recipe, store, 0, self.wait_s)
            self._listeners.inside = lambda: self.group.inside
        except BaseException:
            self._is_building = False  # what waits for a lost rank has ended, so this process need not
            for process in self._processes:
                process.end()
            raise
        self.write = self._listeners.write

    def _gathered(
        self, recipe: Recipe, cluster: Cluster, spares: SpareRanks
    ) -> tuple[dist.Store, dict[str, socket.socket]]:
        """Return the ranks' store, and the connections of all other ranks by name."""
        ranks, within_s = recipe.parallel.ranks, recipe.parallel.connect_timeout_s
        here = cluster.ranks_of(0, ranks)
        devices = devices_of(recipe, len(here))
        address = leader_address(cluster, recipe.parallel.interface)
        with bound(address, 0) as server, bound(address, cluster.port) as of_store:
            port, found_at = of_store.getsockname()[1], address or cluster.leader
            store = dist.TCPStore(
                found_at,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=within_s),
                master_listen_fd=of_store.detach(),
            )
            secret = new_secret()
            recording_at = address_of_recording(address, cluster.leader)
            store.set(RECORDING, f"{recording_at}:{server.getsockname()[1]}")
            store.set(SECRET, secret.decode())
            store.set(WAIT_S, str(self.wait_s))
            store.set(RANKS_HERE, str(ranks_here(recipe.parallel, cluster)))
            store.set(RECIPE, json.dumps(common(recipe)))
            for rank, device in list(zip(here, devices))[1:]:
                at = f"{found_at}:{port}"
                self._processes.append(RankProcess(recipe, rank, at, device, spare=spares.take()))
            with closing(Joining(server, secret)) as joining:
                connections = self._accepted(joining, ranks, within_s)
            store.set(GATHERED, "")
            return store, connections

    def _accepted(self, joining: Joining, ranks: int, within_s: float) -> dict[str, socket.socket]:
        """Return the connections of all other ranks by name.

        One that has joined and then ended comes again: a machine starts all its ranks again if one ends.
        """
        found: dict[int, tuple[str, socket.socket]] = {}
        end_s = time.monotonic() + within_s
        with ExitStack() as opened:  # closed where the ranks do not come together
            while True:
                found = {rank: each for rank, each in found.items() if not _has_ended(*each)}
                missing = [rank for rank in range(1, ranks) if rank not in found]
                if not missing:
                    break
                for process in self._processes:
                    if process.ended is not None:
                        raise RankLost(f"rank {process.rank} has ended {process.ended} before it joined")
                if time.monotonic() > end_s:
                    who = ", ".join(map(str, missing))
                    raise RankLost(
                        f"of {ranks} ranks, {who} has not joined within {within_s:g} s; see its log, or raise"
                        " parallel.connect_timeout_s"
                    )
                came = joining.next(_LOOKS_S)
                if came is None:
                    continue
                rank, name, connection = came
                opened.enter_context(connection)
                if _has_ended(name, connection):
                    continue
                if rank not in missing and (rank not in found or not _has_ended(*found[rank])):
                    raise RankLost(
                        f"{name} joins, and of {ranks} ranks only {missing} are missing: is one twice?"
                    )
                found[rank] = name, connection
            opened.pop_all()
        return dict(found[rank] for rank in sorted(found))

    def close(self, last: bytes = b"") -> None:
        """Send the ranks the last record, and let them end."""
        self._listeners.close(last)
        self._end()

    def tell(self, doing: str) -> None:
        """Note what this rank does during the start, for messages about a start that takes long."""
        self._listeners.doing = doing

    def start_progress(self) -> str:
        """Describe how far the start is, in one line for whoever waits for it."""
        return self._listeners.start_progress()

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the other ranks answer."""
        return self._listeners.names

    def hear(self, agreement: Agreement) -> None:
        """Pass on what the other ranks answer to questions."""
        self._listeners.answered = agreement.answered

    @contextmanager
    def building(self) -> Iterator[None]:
        """Report a rank that is lost inside this context by name, and end all others."""
        try:
            with watched(self._listeners):
                yield
        except BaseException:
            self._is_building = False  # what waits for a lost rank has ended, so this process need not
            self.close()
            raise
        self._is_building = False

    def check(self) -> None:
        """Raise RankLost if a rank is lost already."""
        self._listeners.check()

    def watched(self, runner: Runner, largest_step_s: float) -> Runner:
        """Return the runner of the built engine with a limit on its steps, whose errors name a lost rank."""
        if self._follows_steps:
            self._listeners.limit_s = max(self._limit_s, LARGEST_STEPS * largest_step_s)
        self._listeners.begin()
        return WatchedRunner(runner, self._listeners)

    def _lost(self, _: str) -> None:
        """End what cannot continue without a lost rank; called in a thread of the listeners."""
        for process in self._processes:
            process.end()
        until_s = time.monotonic() + _GRACE_S
        while time.monotonic() < until_s and not self.ends_process:
            if self._listeners.busy_since_s is None and not self._is_building:
                return  # the next step raises RankLost
            time.sleep(0.02)
        logging.shutdown()
        os._exit(LOST)


def _close(processes: Sequence[RankProcess], listeners: Listeners) -> None:
    listeners.close()
    for process in processes:
        process.end(_GRACE_S)
    if dist.is_initialized() and listeners.lost is None:
        dist.destroy_process_group()
    elif dist.is_initialized():  # a library may wait there for the lost rank for ever
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        with suppress(RuntimeError):  # No thread begins at the interpreter's end, and nothing is left to free
            ending.start()
            ending.join(_GRACE_S)


def _has_ended(name: str, connection: socket.socket) -> bool:
    """Whether nobody is at the other end any more, though what it has sent is still unread; then close it."""
    look = select.poll()
    look.register(connection, select.POLLRDHUP)
    if not look.poll(0):
        return False
    log.warning("%s has ended before all ranks have joined", name)
    connection.close()
    return True


def devices_of(recipe: Recipe, ranks: int) -> Sequence[str | None]:
    """Return the device of each of this machine's ranks, as the variable that makes it visible names it."""
    kind = recipe.device.kind
    if kind == "cpu" or recipe.device.virtual:
        return [None] * ranks
    there = num_devices(kind)
    if there < ranks:
        raise too_few(kind, ranks, there)
    return (named_devices(kind, os.environ) or list(map(str, range(there))))[:ranks]


def stay_near(cluster: Cluster, interface: str | None) -> None:
    """Let the ranks of one machine meet on its loopback, and those of several at the recipe's interface.

    Without one, gloo takes the address of the machine's name, which /etc/hosts may say is a loopback; so it
    is told the interface by which the leader is reached.
    """
    if is_loopback(cluster.leader):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    tell_libraries(interface)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        found = interface_to(cluster.leader)
        if found is None:
            log.warning(
                "gloo takes the address of this machine's name, since no interface that leads to %s is found;"
                " where ranks do not meet there, set parallel.interface",
                cluster.leader,
            )
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = found


def joined(recipe: Recipe, store: dist.Store, rank: int, wait_s: float) -> Group:
    """Return the group of all ranks, once they have joined through the store; see `join`."""
    hide_rank_table(os.environ)
    return join(BACKENDS[recipe.device.kind], store, rank, recipe.parallel.ranks, wait_s)


def recipe_of_a_rank(recipe: Recipe, ranks_here: int) -> Recipe:
    """Return the recipe with the number of threads that each rank of this machine computes with.

    The ranks divide its cores, unless OMP_NUM_THREADS says how many threads each of them has.
    """
    if recipe.device.kind != "cpu" or recipe.device.threads is not None:
        return recipe
    is_said = bool(os.environ.get("OMP_NUM_THREADS"))
    threads = USUAL_THREADS if is_said else max(1, usable_cores() // ranks_here)
    return replace(recipe, device=replace(recipe.device, threads=threads))


class WatchedRunner:
    """A runner that marks when it computes, and that explains why a collective failed."""

    def __init__(self, runner: Runner, listeners: Listeners) -> None:
        self._runner, self._listeners = runner, listeners

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as the wrapped runner does."""
        with watched(self._listeners):
            return self._runner.run(batch)

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a batch as the wrapped runner does; the wait for its result is watched too."""
        with watched(self._listeners):
            wait = self._runner.start(batch)

        def waited() -> Sampled:
            with watched(self._listeners):
                return wait()

        return waited

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Resize the cache as the wrapped runner does."""
        with watched(self._listeners):
            self._runner.resize(num_pages, copies)


@contextmanager
def watched(listeners: Listeners) -> Iterator[None]:
    """Mark that this rank computes with the others while inside this context."""
    listeners.busy_since_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises it, and names an address at most
        until_s = time.monotonic() + _LOSS_NEWS_S
        while listeners.lost is None and time.monotonic() < until_s:
            time.sleep(0.01)
        listeners.check()
        words = str(error)
        if (why := explained(words, 0, end_of_log(os.getpid()))) != words:
            log.error("%s", one_line(why))
            raise RankLost(one_line(why)) from error
        raise
    finally:
        listeners.busy_since_s = None
