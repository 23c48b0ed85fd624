"""Place a recipe on simulated devices, and derive its schedulers and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.step_time import UNKNOWN, StepCosts
from devices.rates import DeviceRates
from models.config import DecoderConfig
from models.cost import ModelPart
from models.parallel.share import check_ranks
from recipes.assembly.families import model_config
from recipes.assembly.memory_plan import GIB, MemoryPlan
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.assembly.sizing import plan_memory
from recipes.assembly.step_costs import costs_on
from recipes.schema.recipe import Recipe
from simulation.fitted import Fitted
from simulation.roofline import Roofline
from simulation.runner import CostModel

PRODUCTS = {"310P": None, "910": "ascend910", "910B": "ascend910b", "910C": "ascend910c", "950": None}
KINDS = {"cpu": "epyc", "cuda": "h200", "npu": None}
HOST_MEMORY = 2**50  # bytes; a device profile does not state its host's memory, so nothing is refused for it


@dataclass(frozen=True, slots=True)
class Placement:
    """A recipe on `tensor` devices that share each layer, in `pipeline` stages of layers."""

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

    def limits(self, parts: int = 1) -> SchedulerLimits:
        """Return the limits of one of `parts` schedulers that share the pages."""
        num_pages = self.memory.num_pages // parts
        held = (num_pages - 1) * self.recipe.cache.page_size + 1  # the last token is never cached
        longest = min(self.memory.longest_tokens, held)
        windows = tuple(
            (each.window, max(2, each.num_pages // parts), each.num_host_pages)
            for each in self.memory.windows
        )
        most = (num_pages, self.memory.num_host_pages, longest)
        return SchedulerLimits.of(self.config, *most, windows=windows)

    def scheduler(self, **changes: Any) -> Scheduler:
        """Return an empty scheduler as `recipes.assembly.engine` makes it, with changes to its section."""
        section = replace(self.recipe.scheduler, **changes)
        return scheduler_of(section, self.recipe.cache, self.limits(), step_costs=self._step_costs())

    def stage_schedulers(self) -> list[Scheduler]:
        """Return one scheduler for each stage, with its part of the slots and the pages."""
        section, count = self.recipe.scheduler, self.pipeline
        if section.num_slots % count:
            raise ValueError(f"--pp is {count}; it must divide scheduler.num_slots ({section.num_slots})")
        section = replace(section, num_slots=section.num_slots // count)
        costs = self._step_costs()
        return [
            scheduler_of(section, self.recipe.cache, self.limits(count), step_costs=costs)
            for _ in range(count)
        ]

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
        graphs = self.recipe.device.graphs
        return Roofline(self.config, self.device, self.tensor, graphs, hides_host, stage)

    def send_hidden_s(self, num_tokens: int) -> float:
        """Return the seconds for the hidden states of a step's tokens to reach the next stage."""
        width = self.config.hidden_size * self.config.dtype_bytes
        return self.device.send_s(num_tokens * width / self.tensor)

    def send_cached_s(self, num_tokens: int) -> float:
        """Return the seconds to send a prompt's keys and values to another engine.

        Each device sends its part.
        """
        return self.device.send_s(num_tokens * self.config.kv_bytes_per_token(self.tensor))

    def facts(self) -> dict[str, object]:
        """Return what a result states about the machine, as the gate requires."""
        return {
            "device_profile": self.device.name,
            "costs": "fitted to a recorded run"
            if self.fitted
            else f"{self.device.basis}: {self.device.source}",
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
    try:
        check_ranks(config, tensor)
    except ValueError as error:
        raise ValueError(f"--tp: {error}") from error
    if pipeline < 1 or config.num_layers % pipeline:
        raise ValueError(f"--pp is {pipeline}; it must divide the model's {config.num_layers} layers")
    found = DeviceRates.load(name)
    memory_bytes = int(found.memory_gib * GIB)
    try:
        memory = plan_memory(
            recipe, config, memory_bytes, tensor=tensor, stages=pipeline, host_memory=HOST_MEMORY
        )
    except ValueError as error:
        num_devices = tensor * pipeline
        raise ValueError(
            f"simulated on {num_devices} x {found.name} of {found.memory_gib:g} GiB: {error}; or raise --tp"
        ) from error
    return Placement(recipe, config, found, memory, tensor, pipeline, fitted)
