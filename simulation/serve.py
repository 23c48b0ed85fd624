"""Simulate how an engine serves a trace on a device that is not present.

    run = serve(trace, scheduler, costs)
    run.figures()["ttft_ms"]["p50"]

Everything is decided by the real `Engine` and `Scheduler`; only time and tokens are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from simulation.replica import Observe, Replica
from simulation.run_totals import RunTotals
from simulation.runner import CostModel


def serve(
    trace: Iterable[Request],
    scheduler: Scheduler,
    costs: CostModel,
    *,
    overlap: bool = False,
    keep_records: bool = False,
    observe: Observe | None = None,
) -> RunTotals:
    """Serve requests, in order of arrival, to the end; raises ValueError if they are not in order.

    Each answer has `max_tokens` tokens if the request says `ignore_eos`. The trace is read as it is served
    and nothing is kept of a request that ended, so memory does not grow with the trace; with `keep_records`
    it does, and `totals.records` has the figures of each request.
    """
    totals = RunTotals(records=[] if keep_records else None)
    replica = Replica(scheduler, costs, totals, overlap=overlap, observe=observe)
    for request in in_order(trace):
        replica.advance(request.arrival_s)
        replica.add(request)
    replica.advance(math.inf)
    replica.counter.close()
    return totals


def in_order(trace: Iterable[Request]) -> Iterable[Request]:
    """Yield the same requests; raises ValueError at one that arrives before its predecessor."""
    before_s = -math.inf
    for request in trace:
        if request.arrival_s < before_s:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival_s:g} s, after one of {before_s:g} s;"
                " sort the trace by arrival_s"
            )
        before_s = request.arrival_s
        yield request
