"""Serve a trace by one simulated engine, several, a disaggregated fleet or a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmark.simulate.placement import Placement
from benchmark.simulate.trace_events import TraceEventFile
from continuous_batching.batch import Batch
from continuous_batching.request import Request
from continuous_batching.routing.routing import Route
from continuous_batching.routing.splitting import Split, SplitWeights
from simulation.disaggregated import DisaggregatedFleet
from simulation.fleet import serve_fleet
from simulation.pipeline import Pipeline, Stages
from simulation.replica import Replica
from simulation.run_totals import RunTotals

Result = dict[str, Any]
SIMULATED = "not measured: the real scheduler against a cost model"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One placement, `replicas` times side by side, or `split` into engines for prompts and for answers.

    The engines for prompts compute those prompts that `split_by` selects.
    """

    placement: Placement
    replicas: int = 1
    route: Route = "round_robin"
    split: tuple[int, int] | None = None
    split_by: Split = "cost"
    weights: SplitWeights | None = None  # None: the router's

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices * (sum(self.split) if self.split else self.replicas)

    @property
    def num_slots(self) -> int:
        return self.placement.recipe.scheduler.num_slots * (sum(self.split) if self.split else self.replicas)

    def serve(
        self, trace: Iterable[Request], timeline: TraceEventFile | None, *, records: bool
    ) -> tuple[RunTotals, Result]:
        """Serve a trace; returns its totals, and figures that only this deployment has."""
        totals = RunTotals(records=[] if records else None)
        if self.split is not None:
            return totals, self._split(trace, totals)
        if self.placement.pipeline > 1:
            return totals, self._pipeline(trace, totals, timeline)
        overlap, costs = self.placement.recipe.scheduler.overlap, self.placement.costs()
        observe = None if timeline is None else timeline.observe
        replicas = [
            Replica(
                self.placement.scheduler(),
                costs,
                totals,
                overlap=overlap,
                observe=None if number else observe,
            )
            for number in range(self.replicas)
        ]
        routed = serve_fleet(trace, replicas, self.route)
        own: Result = {"busy_share": _share(totals.busy_s, self.replicas, totals)}
        return totals, own | routed.figures() if self.replicas > 1 else own

    def _split(self, trace: Iterable[Request], totals: RunTotals) -> Result:
        placement, (num_prompts, num_answers) = self.placement, self.split or (1, 1)
        fleet = DisaggregatedFleet(
            [placement.scheduler() for _ in range(num_prompts)],
            [placement.scheduler() for _ in range(num_answers)],
            placement.costs(),
            placement.send_cached_s,
            totals,
            num_layers=placement.config.num_layers,
            route=self.route,
            split=self.split_by,
            weights=self.weights,
            overlap=placement.recipe.scheduler.overlap,
        )
        fleet.serve(trace)
        return {
            "prompts_apart": fleet.num_split,
            "busy_share": _share(totals.busy_s, num_prompts + num_answers, totals),
        }

    def _pipeline(
        self, trace: Iterable[Request], totals: RunTotals, timeline: TraceEventFile | None
    ) -> Result:
        def observe(stage: int, number: int, batch: Batch, begin_s: float, end_s: float) -> None:
            if timeline is not None:
                args = {"scheduler": number, "spans": batch.num_spans, "tokens": batch.num_tokens}
                timeline.lane(f"batch of {number}", stage, begin_s, end_s, args)

        placement = self.placement
        stages = Stages(placement.stage_costs(), placement.send_hidden_s, observe)
        Pipeline(placement.stage_schedulers(), stages, totals).serve(trace)
        return {
            "busy_share": _share(stages.busy_s, placement.pipeline, totals),
            "bubble_s": {kind: round(each, 4) for kind, each in stages.bubbles_s.items()},
        }


def _share(busy_s: float, count: int, totals: RunTotals) -> float:
    duration_s = totals.last_finish_s - totals.first_arrival_s
    return round(busy_s / count / duration_s, 4) if totals.completed and duration_s > 0 else 0.0
