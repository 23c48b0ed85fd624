"""Compute something in each rank of a recipe, without an engine that leads the ranks."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from recipes.cluster.rank_process import VISIBLE
from recipes.cluster.ranks import devices_of, joined, recipe_of_a_rank
from recipes.machine import start
from recipes.schema.recipe import Recipe

_ENDED_S = 2.0  # time from the end of a pipe to that of its process
_LEFT_S = 30.0  # time in which a rank that has given its result leaves the others

Body = Callable[..., Any]  # called with the recipe of a rank, the group of all ranks, and further arguments


def in_ranks(recipe: Recipe, body: Body, *rest: Any, within_s: float | None = None) -> list[Any]:
    """Run `body`, a function of a module, in a process for each rank, and return the results by rank.

    Raises OSError where a rank ends before it has a result, or has none in time; all ranks are ended then.
    """
    ranks = recipe.parallel.ranks
    devices, recipe = devices_of(recipe, ranks), recipe_of_a_rank(recipe, ranks)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        timeout = timedelta(seconds=recipe.parallel.connect_timeout_s)
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=server.detach(),
        )
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_rank,
            args=(recipe, rank, devices[rank], port, pipes[rank][1], body, rest),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for process, (_, ours) in zip(processes, pipes):
        process.start()
        ours.close()  # closed here, so that the end of the process is seen as the end of the pipe
    try:
        found: list[Any] = [None] * ranks
        waiting = {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
        end_s = None if within_s is None else time.monotonic() + within_s
        while waiting:  # other ranks may wait for one that has ended, whatever its number
            ready = wait(list(waiting), None if end_s is None else max(0.0, end_s - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise OSError(f"ranks have no result after {within_s:.0f} s: {late}")
            for pipe in [each for each in waiting if each in ready]:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(_ENDED_S)
                    raise OSError(f"a rank has ended: rank {rank} ({processes[rank].exitcode})") from None
        for process in processes:
            process.join(_LEFT_S)
    finally:
        for process in processes:
            process.kill()
        del store
    return found


def _rank(
    recipe: Recipe,
    rank: int,
    device: str | None,
    port: int,
    found: Connection,
    body: Body,
    rest: tuple[Any, ...],
) -> None:
    """Compute one rank's result, in a process of its own."""
    if device is not None:
        os.environ[VISIBLE[recipe.device.kind]] = device
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start(recipe.device)  # it imports the library of the collectives
    parallel = recipe.parallel
    within = timedelta(seconds=parallel.connect_timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=within)
    group = joined(recipe, store, rank, parallel.start_timeout_s)
    found.send(body(recipe, group, *rest))
    dist.destroy_process_group()
