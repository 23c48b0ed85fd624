"""How does a recipe become an engine?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from attention.reference import Attention
from continuous_batching.engine import Engine
from continuous_batching.recording.recorder import Recorder
from devices.shapes import AttentionShape
from kv_cache.storage import KVCache
from models import weights
from models.config import DecoderConfig
from models.decoder import Decoder
from models.graphs import ladder
from models.ops.reference import Ops
from models.runner import ModelRunner
from models.sampling.sampler import Sampler
from models.warm_up import capture, largest_step_bytes, warm_up
from recipes.build.machine import Machine, start
from recipes.build.memory_plan import Sizing, report
from recipes.build.scheduler import Limits, facts_of, scheduler_of
from recipes.build.sizing import model_config, size
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)


def build(recipe: Recipe, clock: Callable[[], float] = time.monotonic) -> Engine:
    """An engine that is ready to serve; raises ValueError for a recipe that cannot be.

    The model's configuration is `engine.runner.config`. What was chosen is logged, one line each for the
    device, the model, the cache and the operators.
    """
    config = model_config(recipe)
    machine = start(recipe.device)
    sizing = size(recipe, config, machine.memory_bytes())
    fused, attention = machine.operators(_shape(recipe, config))
    attention.check()
    attention.check_longest(sizing.longest_tokens)
    if config.quantization is not None:
        fused.check_int8(config.dtype)
    if recipe.device.graphs:
        rows = min(recipe.device.graphs, recipe.scheduler.num_slots)
        attention.check_graphs(len(ladder(rows, recipe.cache.page_size)))
    decoder = Decoder(config, fused, attention)
    if recipe.model.weights == "random":
        weights.random(decoder, recipe.model.seed)
    else:
        assert recipe.model.path is not None, "a checkpoint has a path"
        weights.load(decoder, recipe.model.path)
    cache = KVCache(
        config.num_layers,
        sizing.num_pages,
        recipe.cache.page_size,
        config.num_kv_heads,
        config.head_dim,
        config.dtype,
        attention.device,
        num_host_pages=sizing.num_host_pages,
        allocate=attention.new_pages,
        sliced=attention.sliced,
    )
    limits = Limits(
        num_pages=sizing.num_pages,
        num_host_pages=sizing.num_host_pages,
        longest_tokens=sizing.longest_tokens,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_shared_tokens=config.max_shared_positions,
    )
    scheduler = scheduler_of(recipe.scheduler, recipe.cache, limits)
    sampler = Sampler(config.eos_token_ids, config.vocab_size, fused)
    runner = ModelRunner(decoder, cache, attention, sampler, scheduler.slots)
    engine = Engine(scheduler, runner, clock, overlap=recipe.scheduler.overlap)
    log.info("device: %s", machine.name)
    sizing = _measure(recipe, config, sizing, engine, runner, machine)
    machine.settle(runner)
    _log(recipe, config, sizing, fused, attention)
    if recipe.scheduler.record is not None:
        limits = replace(limits, num_pages=sizing.num_pages)
        facts = facts_of(recipe.scheduler, recipe.cache, limits)
        engine.observer = Recorder(recipe.scheduler.record, facts)
    return engine


def _measure(
    recipe: Recipe,
    config: DecoderConfig,
    estimated: Sizing,
    engine: Engine,
    runner: ModelRunner,
    machine: Machine,
) -> Sizing:
    """Capture graphs, run the largest step, and size again where both take more than was estimated.

    What an earlier engine of this process left allocated is not counted: less is not believed.
    """
    budget = recipe.scheduler.max_batch_tokens
    warm_up(runner, budget)
    captured = capture(runner, recipe.device.graphs) if recipe.device.graphs else 0
    measured = largest_step_bytes(runner, budget)
    if measured is None or measured + captured <= estimated.activation_bytes:
        return estimated
    sizing = size(recipe, config, machine.memory_bytes(), measured + captured)
    if sizing.num_pages != estimated.num_pages:
        engine.resize(sizing.num_pages)
        warm_up(runner, budget)
    return sizing


def _shape(recipe: Recipe, config: DecoderConfig) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=recipe.cache.page_size,
        scale=config.head_dim**-0.5,
        dtype=config.dtype,
        windows=config.windows,
    )


def _log(recipe: Recipe, config: DecoderConfig, sizing: Sizing, fused: Ops, attention: Attention) -> None:
    lines = dict(report(recipe, config, sizing))
    log.info("model: %s, weights %s (%s)", lines["model"], lines["weights"], recipe.model.weights)
    log.info("cache: %s pages of %s, %s", f"{sizing.num_pages:,}", lines["a page"], lines["cache"])
    log.info("operators of %s: %s", type(fused).__name__, _overridden(fused, Ops))
    log.info("attention of %s: %s", type(attention).__name__, _overridden(attention, Attention))


def _overridden(operators: object, plain: type) -> str:
    """Which of the plain operators a device does in its own way."""
    names = [name for name in vars(plain) if name[0] != "_" and callable(getattr(plain, name))]
    fused = [
        name
        for name in names
        if getattr(getattr(operators, name), "__func__", None) is not getattr(plain, name)
    ]
    return f"fused are {', '.join(fused)}" if fused else "all plain torch"
