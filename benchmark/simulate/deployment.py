"""Place a recipe on simulated devices, and serve a trace there.

A placement derives schedulers and costs from the recipe. A deployment is one engine of a placement, several
behind a router, engines for prompts and for answers, or stages of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmark.recordings import SimulatedTrace
from continuous_batching.batch import Batch
from continuous_batching.request import Request
from continuous_batching.routing.routing import Route
from continuous_batching.routing.splitting import Split, SplitWeights
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.step_time import UNKNOWN, StepCosts
from devices.rates import DeviceRates
from models.config import DecoderConfig
from models.cost import ModelPart
from models.parallel.share import check_contexts, check_ranks
from recipes.assembly.families import model_config
from recipes.assembly.memory_plan import GIB, MemoryPlan
from recipes.assembly.scheduler import SchedulerLimits, costs_on, scheduler_of
from recipes.assembly.sizing import plan_memory
from recipes.schema.recipe import Recipe
from simulation.disaggregated import DisaggregatedFleet
from simulation.fitted import Fitted
from simulation.fleet import serve_fleet
from simulation.pipeline import PipelineRunner, Stages
from simulation.replica import CostModel, Replica
from simulation.roofline import Roofline
from simulation.run_totals import RunTotals

PRODUCTS = {"310P": None, "910": "ascend910", "910B": "ascend910b", "910C": "ascend910c", "950": None}
KINDS = {"cpu": "epyc", "cuda": "h200", "npu": None}
HOST_MEMORY = 2**50  # bytes; a device profile does not state its host's memory, so nothing is refused for it
Result = dict[str, Any]
SIMULATED = "not measured: the real scheduler against a cost model"


@dataclass(frozen=True, slots=True)
class Placement:
    """A recipe on `tensor` devices that share each layer, in `pipeline` stages of layers.

    Devices divide each page of the cache as the recipe says, which `place` clears for other numbers of them.
    """

    recipe: Recipe
    config: DecoderConfig
    device: DeviceRates
    memory: MemoryPlan  # plan for all devices together
    tensor: int = 1
    pipeline: int = 1
    fitted: Fitted | None = None

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def limits(self) -> SchedulerLimits:
        """Return the limits of a scheduler."""
        memory = self.memory
        held = (memory.num_pages - 1) * self.recipe.cache.page_size + 1  # the last token is never cached
        most = (memory.num_pages, memory.num_host_pages, min(memory.longest_tokens, held))
        states = memory.num_states, memory.num_host_states
        return SchedulerLimits.of(self.config, *most, windows=memory.window_pools, num_states=states)

    def scheduler(self, **changes: Any) -> Scheduler:
        """Return an empty scheduler as `recipes.assembly.engine` makes it, with changes to its section."""
        section, costs = replace(self.recipe.scheduler, **changes), self._step_costs()
        return scheduler_of(section, self.recipe.cache, self.limits(), depth=self.pipeline, step_costs=costs)

    def _step_costs(self) -> StepCosts:
        """Return what the scheduler starts from, as on a real device of this profile."""
        if self.fitted is not None:
            return UNKNOWN
        return costs_on(self.recipe, self.config, self.device, self.tensor, self.pipeline)

    def costs(self) -> CostModel:
        """Return the costs of a step: as fitted to a recording, or by the device's roofline."""
        return self.fitted or self._roofline(None, hides_host=self.recipe.scheduler.overlap)

    def stage_costs(self) -> list[CostModel]:
        """Return the costs of a step in each stage; the host's work is counted in the first."""
        layers = self.config.num_layers // self.pipeline
        stages = [ModelPart(layers, has_head=number + 1 == self.pipeline) for number in range(self.pipeline)]
        return [self._roofline(stage, hides_host=number > 0) for number, stage in enumerate(stages)]

    def _roofline(self, stage: ModelPart | None, *, hides_host: bool) -> Roofline:
        graphs, parallel = self.recipe.device.graphs, self.recipe.parallel
        of_ranks = parallel.context, parallel.least_divided_tokens
        return Roofline(self.config, self.device, self.tensor, graphs, hides_host, stage, *of_ranks)

    def send_hidden_s(self, num_tokens: int) -> float:
        """Return the seconds for the hidden states of a step's tokens to reach the next stage."""
        width = self.config.hidden_size * self.config.dtype_bytes
        return self.device.send_s(num_tokens * width / self.tensor)

    def send_cached_s(self, num_tokens: int) -> float:
        """Return the seconds to send a prompt's keys and values to another engine, and the states behind it.

        Each device sends its part.
        """
        num_bytes = num_tokens * self.config.kv_bytes_per_token(self.tensor) / self.recipe.parallel.context
        return self.device.send_s(num_bytes + self.config.state_bytes / self.tensor)

    def facts(self, num_joined: int = 0) -> dict[str, object]:
        """Return what a result states about the machine, as the gate requires.

        `num_joined` counts its devices and those of engines that it sends pages to; 0: its own alone.
        """
        num_joined = max(num_joined, self.num_devices)
        basis, linked = f"{self.device.basis}: {self.device.source}", self.device.linked_devices
        if 0 < linked < num_joined:
            basis += f"; {num_joined} devices are taken as joined by the links that join {linked}"
        return {
            "device_profile": self.device.name,
            "costs": "fitted to a recorded run" if self.fitted else basis,
            "num_devices": self.num_devices,
            "weight_bytes_per_step": self.config.step_weight_bytes,
            "kv_bytes_per_token": self.config.growing_kv_bytes_per_token,
        }


def device_name(recipe: Recipe, device: str | None) -> str:
    """Return the profile of the simulated device; raises ValueError where there is none."""
    name = device or PRODUCTS.get(recipe.device.product or "") or KINDS[recipe.device.kind]
    if name is None:
        raise ValueError("the recipe names no device that has a profile; name one with --device")
    return DeviceRates.load(name).name


def place(
    recipe: Recipe, device: str | None, tensor: int = 1, pipeline: int = 1, fitted: Fitted | None = None
) -> Placement:
    """Place the recipe on a profile's device, or on its own; raises ValueError if it cannot run there."""
    config = model_config(recipe)
    name = device_name(recipe, device)
    if tensor != recipe.parallel.tensor:  # only as many ranks as the recipe has divide pages as it says
        recipe = replace(recipe, parallel=replace(recipe.parallel, context=1))
    try:
        option = "parallel.tensor" if tensor == recipe.parallel.tensor else "--tp"
        check_ranks(config, tensor)
        option = "parallel.context"
        check_contexts(config, tensor, recipe.parallel.context)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if pipeline < 1 or config.num_layers % pipeline:
        option = "parallel.pipeline" if pipeline == recipe.parallel.pipeline else "--pp"
        raise ValueError(f"{option} is {pipeline}; it must divide the model's {config.num_layers} layers")
    found = DeviceRates.load(name)
    memory_bytes = int(found.memory_gib * GIB)
    try:
        memory = plan_memory(
            *(recipe, config, memory_bytes),
            tensor=tensor,
            stages=pipeline,
            host_memory=HOST_MEMORY,
            ranks_here=1,
        )
    except ValueError as error:
        num_devices = tensor * pipeline
        raise ValueError(
            f"simulated on {num_devices} x {found.name} of {found.memory_gib:g} GiB: {error}; or raise --tp"
        ) from error
    return Placement(recipe, config, found, memory, tensor, pipeline, fitted)


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

    def __post_init__(self) -> None:
        if (kind := self.placement.recipe.speculation.kind) != "none":
            raise ValueError(
                f"speculation.kind is {kind}, and simulated answers have no tokens to guess; add"
                " speculation.kind=none"
            )
        if self.placement.pipeline > 1 and (self.replicas > 1 or self.split is not None):
            raise ValueError(
                f"{self.placement.pipeline} stages of layers are simulated for one engine alone; add"
                " parallel.pipeline=1, and no --pp, or simulate one engine"
            )

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices * (sum(self.split) if self.split else self.replicas)

    @property
    def num_slots(self) -> int:
        return self.placement.recipe.scheduler.num_slots * (sum(self.split) if self.split else self.replicas)

    def serve(
        self, trace: Iterable[Request], timeline: SimulatedTrace | None, *, records: bool
    ) -> tuple[RunTotals, Result]:
        """Serve a trace; returns its totals, and figures that only this deployment has."""
        totals = RunTotals(records=[] if records else None)
        if self.split is not None:
            return totals, self._split(trace, totals)
        if self.placement.pipeline > 1:
            return totals, self._pipeline(trace, totals, timeline)
        placement = self.placement
        overlap, costs = placement.recipe.scheduler.overlap, placement.costs()
        observe = [None if timeline is None else timeline.observe, *[None] * (self.replicas - 1)]
        replicas = [
            Replica(placement.scheduler(), costs, totals, overlap=overlap, observe=each) for each in observe
        ]
        routed = serve_fleet(trace, replicas, self.route)
        own: Result = {"busy_share": _share(totals.busy_s, self.replicas, totals)}
        return totals, own | routed.figures() if self.replicas > 1 else own

    def facts(self) -> Result:
        """Return what a result states about the machines; engines for prompts send pages to the others."""
        num_joined = self.num_devices if self.split else 0
        return {**self.placement.facts(num_joined), "devices": self.num_devices}

    def figures(self, totals: RunTotals, own: Result) -> Result:
        """Return what ran and how it fared, as the gate reads it."""
        return {
            **self.facts(),
            "slots": self.num_slots,
            "max_tokens_per_step": 1,
            "warm_up_counted": 0,
            **totals.figures(),
            **own,
        }

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
        self, trace: Iterable[Request], totals: RunTotals, timeline: SimulatedTrace | None
    ) -> Result:
        def observe(stage: int, batch: Batch, begin_s: float, end_s: float) -> None:
            if timeline is not None:
                args = {"spans": batch.num_spans, "tokens": batch.num_tokens}
                timeline.lane("batch", stage, begin_s, end_s, args)

        placement, scheduler = self.placement, self.placement.scheduler()
        stages = Stages(placement.stage_costs(), placement.send_hidden_s, observe)
        replica = Replica(
            scheduler,
            stages.costs[0],
            totals,
            overlap=placement.recipe.scheduler.overlap,
            runner=lambda clock: PipelineRunner(clock, stages, scheduler.slots),
        )
        serve_fleet(trace, [replica])
        return {
            "busy_share": _share(stages.busy_s, placement.pipeline, totals),
            "bubble_s": {kind: round(each, 4) for kind, each in stages.bubbles_s.items()},
        }


def _share(busy_s: float, count: int, totals: RunTotals) -> float:
    duration_s = totals.last_finish_s - totals.first_arrival_s
    return round(busy_s / count / duration_s, 4) if totals.completed and duration_s > 0 else 0.0
