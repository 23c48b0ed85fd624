"""How does a recipe become a simulated engine?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from continuous_batching.scheduling.scheduler import Scheduler
from models.config import DecoderConfig
from recipes.build.families import model_config
from recipes.build.memory_plan import GIB
from recipes.build.scheduler import SchedulerLimits, scheduler_of
from recipes.build.sizing import estimate, max_positions
from recipes.schema.recipe import Recipe
from simulation.device import Device
from simulation.fitted import Fitted
from simulation.roofline import Part, Roofline
from simulation.runner import CostModel
from simulation.shape import Shape

PRODUCTS = {"310P": None, "910": "ascend910", "910B": "ascend910b", "910C": "ascend910c", "950": None}
KINDS = {"cpu": "epyc", "cuda": "h200", "npu": None}


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe on `tensor` devices that share each layer, in `pipeline` stages of layers."""

    recipe: Recipe
    config: DecoderConfig
    shape: Shape
    device: Device
    tensor: int = 1
    pipeline: int = 1
    fitted: Fitted | None = None

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def page_bytes(self) -> int:
        """Of a page, on all devices together."""
        return self.recipe.cache.page_size * self.tensor * self.shape.held_bytes_per_token(self.tensor)

    @property
    def num_pages(self) -> int:
        """As the recipe says, or as many as the devices hold beside their part of the weights."""
        cache = self.recipe.cache
        if cache.num_pages is not None:
            return cache.num_pages
        if cache.memory_gib is not None:
            num_bytes = cache.memory_gib * GIB * self.num_devices
        else:
            assert cache.memory_fraction is not None, "a recipe says how many pages there are"
            each = cache.memory_fraction * self.device.memory_gib * GIB - cache.reserve_gib * GIB
            activations = estimate(self.recipe, self.config) / self.tensor
            num_bytes = self.num_devices * (each - activations) - self.shape.weight_bytes
        if num_bytes < 2 * self.page_bytes:
            raise ValueError(
                f"{self.num_devices} x {self.device.name} of {self.device.memory_gib:g} GiB hold"
                f" {self.shape.weight_bytes / GIB:.1f} GiB of weights and no page beside; raise --tp"
            )
        return int(num_bytes // self.page_bytes)

    def limits(self, parts: int = 1) -> SchedulerLimits:
        """Of one of so many schedulers that share the pages."""
        num_pages = self.num_pages // parts
        held = (num_pages - 1) * self.recipe.cache.page_size + 1  # the last token is never cached
        asked = self.recipe.scheduler.max_request_tokens or max_positions(self.config)
        host_bytes = (self.recipe.cache.host_gib or 0) * GIB
        num_host_pages = int(host_bytes // self.page_bytes)
        return SchedulerLimits.of(self.config, num_pages, num_host_pages, min(asked, held))

    def scheduler(self, **changes: Any) -> Scheduler:
        """An empty one, as `recipes.build.engine` would make it, but for what is changed of its section."""
        asked = replace(self.recipe.scheduler, **changes)
        return scheduler_of(asked, self.recipe.cache, self.limits())

    def parts(self) -> list[Scheduler]:
        """One for each stage, with its part of the slots and the pages."""
        asked, count = self.recipe.scheduler, self.pipeline
        if asked.num_slots % count:
            raise ValueError(f"--pp is {count}; it must divide scheduler.num_slots ({asked.num_slots})")
        section = replace(asked, num_slots=asked.num_slots // count)
        return [scheduler_of(section, self.recipe.cache, self.limits(count)) for _ in range(count)]

    def costs(self) -> CostModel:
        """The cost of a step: a fit's, or by the device's roofline."""
        return self.fitted or self._roofline(None, hides_host=self.recipe.scheduler.overlap)

    def stages(self) -> list[CostModel]:
        """The cost of a step in each stage; the host's is in the first."""
        each = self.shape.num_layers // self.pipeline
        parts = [Part(each, has_head=stage + 1 == self.pipeline) for stage in range(self.pipeline)]
        return [self._roofline(part, hides_host=stage > 0) for stage, part in enumerate(parts)]

    def _roofline(self, part: Part | None, *, hides_host: bool) -> Roofline:
        graphs = self.recipe.device.graphs
        return Roofline(self.shape, self.device, self.tensor, graphs, hides_host, part)

    def send_hidden_s(self, num_tokens: int) -> float:
        """For the states of a step's tokens to reach the next stage."""
        width = self.shape.hidden_size * self.shape.dtype_bytes
        return self.device.send_s(num_tokens * width / self.tensor)

    def send_cached_s(self, num_tokens: int) -> float:
        """For the keys and values of a prompt to reach another engine; each device sends its part."""
        return self.device.send_s(num_tokens * self.shape.held_bytes_per_token(self.tensor))

    def facts(self) -> dict[str, object]:
        """What a result says of the machine, and what the gate asks for."""
        shape = self.shape
        whole = sum(window is None for window in shape.windows)  # others forget what leaves their window
        return {
            "device_profile": self.device.name,
            "costs": "fitted to a recorded run"
            if self.fitted
            else f"{self.device.basis}: {self.device.source}",
            "num_devices": self.num_devices,
            "weight_bytes_per_step": shape.weight_bytes - shape.embedding_bytes,
            "kv_bytes_per_token": shape.kv_bytes_per_token * whole // max(1, shape.num_layers),
        }


def plan(
    recipe: Recipe, device: str | None, tensor: int = 1, pipeline: int = 1, fitted: Fitted | None = None
) -> Plan:
    """The plan for a profile's device, or for the recipe's own; raises ValueError for what cannot be."""
    config = model_config(recipe)
    found = device or PRODUCTS.get(recipe.device.product or "") or KINDS[recipe.device.kind]
    if found is None:
        raise ValueError("the recipe names no device that has a profile; name one with --device")
    for option, parts, whole, what in (
        ("--tp", tensor, config.num_heads, "heads"),
        ("--pp", pipeline, config.num_layers, "layers"),
    ):
        if parts < 1 or whole % parts:
            raise ValueError(f"{option} is {parts}; it must divide the model's {whole} {what}")
    return Plan(recipe, config, shape_of(config), Device.load(found), tensor, pipeline, fitted)


def shape_of(config: DecoderConfig) -> Shape:
    """What the simulation knows of a model."""
    quantized = config.quantization is not None
    dtype = str(config.dtype).removeprefix("torch.")
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size * config.dtype.itemsize
    return Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        windows=config.windows,
        weight_bytes=config.weight_bytes,
        dtype=dtype,
        dtype_bytes=config.dtype.itemsize,
        product_dtype="int8" if quantized else dtype,
        product_bytes=1 if quantized else config.dtype.itemsize,
        embedding_bytes=embedding,
    )
