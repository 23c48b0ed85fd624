"""Run a rank that follows the leader, as a process of its own.

    python -m recipes.assembly.follower_process

Its standard input carries a `RankStart`, and ends when its parent does: then this process ends too. It joins
the other ranks, builds its part of the engine, and follows the leader's recording.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from borders.shared_secret import prove_as_dialler, within
from continuous_batching.recording.follower import Beats, Follower, differences
from continuous_batching.recording.rank_tier import FollowersTier
from devices.hccl_errors import end_of_log, explained
from recipes.assembly.engine import assemble
from recipes.assembly.page_tier import tier_of_rank
from recipes.cluster.rank_process import (
    ALONE,
    FAILED,
    GATHERED,
    LENGTH,
    RANKS_HERE,
    RECIPE,
    RECORDING,
    SECRET,
    WAIT_S,
    RankStart,
    common,
    restored,
)
from recipes.cluster.ranks import joined
from recipes.machine import start
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)

LEADER_SILENT_S = 20.0  # a leader whose machine acknowledges nothing for this long is gone


class NoLeader(ConnectionError):
    """There is no leader, for example because the leader has ended for good."""


def _asked() -> RankStart:
    """Return what the parent has sent; a spare process waits here, with all imports done."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return msgspec.json.decode(_read(length), type=RankStart)


def _read(length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.read(0, length - len(data))
        if not more:
            os._exit(FAILED)
        data += more
    return data


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(FAILED)  # a step may wait for ranks that have ended


def _end_without_leader() -> None:
    """End even while this rank waits: a collective waits for lost ranks as long as for slow ones."""
    log.error("the leader is gone")
    os._exit(FAILED)


def follow(recipe: Recipe, rank: int, leader: str) -> None:
    """Join, build, and follow until the leader closes its recording."""
    host, _, port = leader.rpartition(":")
    limit_s = recipe.parallel.connect_timeout_s
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=limit_s))
        near, _, port = store.get(RECORDING).decode().rpartition(":")
    except dist.DistError as error:
        raise NoLeader(f"no leader at {leader} within {limit_s:g} s") from error
    with socket.create_connection((near, int(port)), limit_s) as connection:
        receive = within(connection, limit_s)
        prove_as_dialler(store.get(SECRET), connection.sendall, receive)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * LEADER_SILENT_S))
        try:
            _compare(recipe, json.loads(store.get(RECIPE)))
        except ValueError as error:
            connection.sendall(f"rank {rank}: {error}\n".encode())
            raise
        connection.sendall(f"{rank} process {os.getpid()} on {socket.gethostname()}\n".encode())
        beats = Beats(connection, _end_without_leader)
        beats.explain = lambda why: explained(why, rank, end_of_log(os.getpid()))

        def tell(doing: str) -> None:
            beats.doing = doing

        # Until all are there a rank may end and come again, and must have left nothing of it in the store.
        store.wait([GATHERED])
        try:
            start(recipe.device)  # it imports the library of the collectives
            group = joined(recipe, store, rank, float(store.get(WAIT_S)))
            beats.inside = lambda: group.inside
            built = assemble(recipe, group, tell=tell, ranks_here=int(store.get(RANKS_HERE)))
            tier = None
            if recipe.cache.tier is not None:
                own = tier_of_rank(recipe, built.runner, built.memory, group)
                tier = FollowersTier(own, lambda answer: beats.answer(answer.line))
            decoder = built.runner.decoder
            beats.inside = lambda: decoder.group.inside or decoder.stages.inside
            gc.collect()
            gc.freeze()
        except Exception as error:
            beats.end(str(error))
            raise
        scheduler = built.engine.scheduler
        overlap = recipe.scheduler.overlap or scheduler.depth > 1
        apply = built.runner.cache.apply
        move = None if built.pages is None else built.pages.move
        Follower(
            *(beats, scheduler, built.runner, built.facts),
            apply=apply,
            overlap=overlap,
            works=built.works,
            move=move,
            tier=tier,
        ).follow()


def _compare(recipe: Recipe, leaders: dict[str, Any]) -> None:
    """Raise ValueError where this rank's recipe differs from the leader's.

    The ranks would otherwise wait for each other, or compute two models.
    """
    own = json.loads(json.dumps(common(recipe)))
    for name, mine, theirs in differences(own, leaders):
        raise ValueError(f"{name} is {mine!r} here, and {theirs!r} on the leader; make them equal")


def main() -> int:
    """Follow; the leader is told the reason if this rank cannot."""
    gc.freeze()  # What is imported stays: the collection before the first step need not visit it
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # these signals are for the leader, whose end ends this process
    asked = _asked()
    os.environ.update(asked.environment)
    logging.basicConfig(
        level=logging.WARNING, format=f"%(levelname)s rank {asked.rank}: %(message)s", stream=sys.stderr
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = FAILED
    try:
        follow(restored(asked.recipe), asked.rank, asked.leader)
        status = 0
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        log.error("%s", error)
        if isinstance(error, NoLeader):
            return ALONE
    return status


if __name__ == "__main__":
    ended = main()
    sys.stderr.flush()
    os._exit(ended)  # the interpreter's normal exit waits for threads that may wait for other ranks
