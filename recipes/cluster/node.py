"""Hold the ranks of an engine on a machine that does not lead.

The machine starts its ranks, and starts them again when they have ended with their leader: the next engine of
a server leads the next ranks. It ends when a leader has closed its engine in order, or when there is no
leader any more. Where the system asks all machines to end, the leader lets its requests end first, for which
it needs the ranks: so this machine waits for it, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Sequence
from types import FrameType

from recipes.cluster.cluster import Cluster, ranks_here
from recipes.cluster.rank_process import ALONE, RankProcess
from recipes.cluster.ranks import devices_of, recipe_of_a_rank, stay_near
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)

_LOOKS_S = 0.1  # interval between checks of the ranks
_PAUSE_S = 0.5  # pause before ranks are started again
_IN_ORDER_S = 2.0  # time for the others to end where one has ended in order
_AGAIN = "; the ranks of this machine are started again"
_CLOSES_S = 5.0  # time for a leader to close its engine once its requests have ended


class AskedToEnd(SystemExit):
    """The system asks this process to end, and its ranks have not ended with their leader."""


class _Signals:
    """What signals have asked of this process: the first lets its ranks end, and the second does not wait."""

    def __init__(self, within_s: float) -> None:
        self.status = 0  # exit status by the last signal; 0 before any
        self.end_s = math.inf
        self.within_s = within_s
        self.is_told = False  # the log says that this process waits
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_second, self.status = self.status != 0, 128 + number
        if is_second:
            raise AskedToEnd(self.status)
        self.end_s = time.monotonic() + self.within_s


def hold(recipe: Recipe, cluster: Cluster) -> int:
    """Hold this machine's ranks, life after life, and return 0 when the leader has closed its engine."""
    signals = _Signals(recipe.server.drain_s + _CLOSES_S)
    stay_near(cluster, recipe.parallel.interface)
    here = cluster.ranks_of(cluster.node, recipe.parallel.ranks)
    own = recipe_of_a_rank(recipe, ranks_here(recipe.parallel, cluster))
    leader = f"{cluster.leader}:{cluster.port}"
    devices = devices_of(recipe, len(here))
    while signals.status == 0:
        log.info("ranks %d to %d of %d follow %s", here[0], here[-1], recipe.parallel.ranks, leader)
        with contextlib.ExitStack() as stack:
            ranks: list[RankProcess] = []
            for number, device in zip(here, devices):
                ranks.append(RankProcess(own, number, leader, device))
                stack.callback(ranks[-1].end)
            first = _first_ended(ranks, signals)
            if first.status == 0:
                for rank in ranks:
                    rank.end(_IN_ORDER_S)
        if first.status == 0:
            log.info("the leader has closed its engine")
            return 0
        if first.status == ALONE:
            log.error("there is no leader at %s", leader)
            return ALONE
        log.warning("rank %d has ended %s%s", first.rank, first.ended, "" if signals.status else _AGAIN)
        time.sleep(_PAUSE_S)
    return signals.status


def _first_ended(ranks: Sequence[RankProcess], signals: _Signals) -> RankProcess:
    """Wait for a rank that ends; raises AskedToEnd where none does in the time after a signal."""
    while (ended := next((rank for rank in ranks if rank.ended), None)) is None:
        if time.monotonic() > signals.end_s:
            raise AskedToEnd(signals.status)
        if signals.status and not signals.is_told:  # The handler may interrupt a write to the log
            signals.is_told = True
            told = "asked to end: the leader has %g s to let its requests end; a second signal does not wait"
            log.info(told, signals.within_s)
        time.sleep(_LOOKS_S)
    return ended
