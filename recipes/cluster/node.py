"""Hold the ranks of an engine on a machine that does not lead.

The machine starts its ranks, and starts them again when they have ended with their leader: the next engine of
a server leads the next ranks. It ends when a leader has closed its engine in order, or when there is no
leader any more.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from types import FrameType

from recipes.cluster.cluster import Cluster
from recipes.cluster.rank_process import ALONE, RankProcess
from recipes.cluster.ranks import devices_of, recipe_of_a_rank, stay_near
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)

_LOOKS_S = 0.1  # interval between checks of the ranks
_PAUSE_S = 0.5  # pause before ranks are started again
_IN_ORDER_S = 2.0  # time for the others to end where one has ended in order


class AskedToEnd(SystemExit):
    """The system asks this process to end."""


def hold(recipe: Recipe, cluster: Cluster) -> int:
    """Hold this machine's ranks, life after life, and return 0 when the leader has closed its engine."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _end)
    stay_near(cluster, recipe.parallel.interface)
    here = cluster.ranks_of(cluster.node, recipe.parallel.ranks)
    own, leader = recipe_of_a_rank(recipe, len(here)), f"{cluster.leader}:{cluster.port}"
    devices = devices_of(recipe, len(here))
    while True:
        log.info("ranks %d to %d of %d follow %s", here[0], here[-1], recipe.parallel.ranks, leader)
        with contextlib.ExitStack() as stack:
            ranks: list[RankProcess] = []
            for number, device in zip(here, devices):
                ranks.append(RankProcess(own, number, leader, device))
                stack.callback(ranks[-1].end)
            while not any(rank.ended for rank in ranks):
                time.sleep(_LOOKS_S)
            first = next(rank for rank in ranks if rank.ended)
            if first.status == 0:
                for rank in ranks:
                    rank.end(_IN_ORDER_S)
        if first.status == 0:
            log.info("the leader has closed its engine")
            return 0
        if first.status == ALONE:
            log.error("there is no leader at %s", leader)
            return ALONE
        log.warning(
            "rank %d has ended %s; the ranks of this machine are started again", first.rank, first.ended
        )
        time.sleep(_PAUSE_S)


def _end(number: int, frame: FrameType | None) -> None:
    raise AskedToEnd(128 + number)
