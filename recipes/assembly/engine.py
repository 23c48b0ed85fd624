"""Build an engine from a recipe: load the weights, plan the memory, warm up and measure."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from attention.reference import Attention
from borders.files import first_line, in_one_line
from borders.start_report import LOADING, StartReport, repeated
from continuous_batching.engine import Engine
from continuous_batching.recording.agreement import LEADER, Agreement, RankQuestions, Work
from continuous_batching.recording.rank_tier import LeadersTier
from continuous_batching.recording.recorder import Recorder, RecordingFile, Sink
from continuous_batching.samples.mask_maker import MaskMaker
from kv_cache.device.rank_pages import RankPages
from models.checkpoint import weights
from models.checkpoint.adapter_files import look_at
from models.checkpoint.int4 import inputs_of_experts, largest_side
from models.config import DecoderConfig, HeadConfig
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.modelslim import Described
from models.ops.reference import Ops
from models.parallel.group import ALONE, Group, StageLinks, divided
from models.parallel.share import Share
from models.sampling.follower import FollowerSampler
from models.sampling.sampler import Sampler
from models.step.adapters import Adapters
from models.step.expert_counts import ExpertCounts, StageCounts
from models.step.graphs import captured_sizes
from models.step.runner import ModelRunner, RowSampler
from models.step.stage_runner import StageRunner
from models.step.warm_up import capture, largest_step_bytes, warm_up
from recipes.assembly.decoders import cache_of, draft_decoder, drafter_of, kept_weights, operators_of
from recipes.assembly.families import (
    WITH_MTP,
    draft_config,
    impossible_ends,
    overridden_fields,
    share_of,
    told_by_weights,
    unknown_fields,
    unread_layers,
)
from recipes.assembly.live_memory import LiveMemory
from recipes.assembly.memory_plan import MemoryPlan, report
from recipes.assembly.page_events import publish_pages
from recipes.assembly.page_parts import rank_pages
from recipes.assembly.page_tier import attach_tier, tier_for, tier_of_rank
from recipes.assembly.rank_works import ADAPTER, EXPERTS, adapter_work, live_works
from recipes.assembly.scheduler import SchedulerLimits, costs_of, facts_of, scheduler_of
from recipes.assembly.sizing import plan_memory
from recipes.cluster.cluster import find_cluster, ranks_here
from recipes.cluster.rank_process import SpareRanks
from recipes.cluster.ranks import Ranks, recipe_of_a_rank
from recipes.machine import Machine, start
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.scheduler_defaults import completed
from recipes.schema.tier_section import tier_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to serve, and the parts that it was built of."""

    engine: Engine
    runner: ModelRunner
    config: DecoderConfig
    memory: MemoryPlan  # the plan at the start; a later resize changes only the engine's pools
    device_name: str
    largest_step_s: float  # measured before serving
    facts: dict[str, Any]  # what its scheduler is made of, for recordings
    experts: ExpertCounts | None = None  # set where experts are counted
    questions: RankQuestions | None = None  # what the leader asks all ranks
    ranks: Ranks | None = None  # set where there are several ranks
    adapters: Adapters | None = None  # set where there is room for adapters
    works: Mapping[str, Work] = field(default_factory=dict)  # what this rank does when all ranks are asked
    live: LiveMemory | None = None
    pages: RankPages | None = None  # set where several ranks exchange pages with other engines
    learned: Callable[[], str] = lambda: (
        ""
    )  # what its machine has learned, for an engine that takes its place


def build(
    recipe: Recipe,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda _: None,
    learned: str = "",
    spares: SpareRanks | None = None,
) -> BuiltEngine:
    """Return the engine of a recipe, with its other ranks, if it has any.

    Raises ValueError for a recipe that cannot be built, and OSError where a rank is lost meanwhile. The
    choices made are logged, one line each for the device, the model, the cache, the defaults that the
    scheduler's policy took, and the operators. `tell` is given what is done, stage by stage, by each of
    several ranks. `learned` is from the engine whose place this one takes, and says nothing to several ranks,
    which measure nothing; `spares` become the ranks of this machine, as far as there are any.
    """
    if recipe.scheduler.record is not None:
        _check_recording(recipe.scheduler.record)  # checked before the build, which takes minutes
    sinks: list[Sink] = []
    cluster = find_cluster(recipe.parallel, os.environ)
    here = ranks_here(recipe.parallel, cluster)
    if recipe.parallel.ranks == 1:
        built = assemble(recipe, clock=clock, tell=tell, learned=learned)
    else:
        share_of(recipe, 0)  # invalid shares are refused before processes are started
        recipe = recipe_of_a_rank(recipe, here)
        tell("gathering its ranks")
        ranks = Ranks(recipe, cluster, spares)
        with ranks.building(), repeated(lambda: tell(ranks.start_progress())):
            built = assemble(recipe, ranks.group, clock, ranks.tell, ranks_here=here)
        tell("")
        built.engine.runner = ranks.watched(built.runner, built.largest_step_s)
        built, sinks = replace(built, ranks=ranks), [ranks]
    _warn_of_checkpoint(recipe, built.config)
    if recipe.scheduler.record is not None:
        sinks = [RecordingFile(recipe.scheduler.record), *sinks]
    if sinks:
        built.engine.observer = Recorder(built.facts, *sinks)
    agreement = Agreement((LEADER, *(() if built.ranks is None else built.ranks.names)))
    questions = RankQuestions(agreement, built.works, built.engine.observer)
    if built.pages is not None:
        built.pages.moves = built.engine.observer
    built.engine.questions, built = questions, replace(built, questions=questions)
    if built.ranks is not None:
        built.ranks.hear(agreement)
    if recipe.cache.events is not None:
        publish_pages(built.engine.scheduler.prefix, recipe.cache)
    if recipe.cache.tier is not None and built.ranks is None:
        attach_tier(built.engine, built.runner.cache, tier_for(recipe, built.runner, built.memory))
    elif (asked := tier_of(recipe.cache.tier)) is not None and built.ranks is not None:
        tier = tier_of_rank(recipe, built.runner, built.memory, built.ranks.group)
        built.engine.tier = LeadersTier(tier, questions, asked.wait_s)
    return built


def build_in_sight(recipe: Recipe) -> BuiltEngine:
    """Return the engine of a recipe, and show on standard error what it does until then."""
    with StartReport(sys.stderr) as report:
        return build(recipe, tell=report.tell)


def assemble(
    recipe: Recipe,
    world: Group = ALONE,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda _: None,
    learned: str = "",
    ranks_here: int | None = None,
) -> BuiltEngine:
    """Build this rank's part of the engine of a recipe.

    All ranks build theirs at the same time, `ranks_here` on this machine; `tell` is given each stage of it.
    """
    tell("planning its memory")
    config, share = share_of(recipe, world.rank)
    drafts = draft_config(recipe, config)
    group, stages = _joined(world, share, drafts)
    machine = start(recipe.device, learned, replaces_weights=recipe.server.weights_root is not None)
    machine.join(world, group, TORCH_DTYPES[config.dtype])
    memory = _planned(recipe, config, world, share, machine, ranks_here)
    tell(LOADING)
    # The smaller model is loaded first, so that a mistake in it is refused before the larger one is read.
    draft = draft_decoder(recipe, config, memory, machine, group, share)
    decoder = _loaded(recipe, config, memory, machine, (group, share, stages), tell)
    adapters = _adapters(recipe, decoder)
    tell("")
    world.meet("the meeting after loading")
    cache = cache_of([decoder] if draft is None else [decoder, draft], recipe, memory)
    limits = _limits(config, memory, drafts)
    depth, costs = recipe.parallel.pipeline, costs_of(recipe, config, machine, world)
    scheduler = scheduler_of(recipe.scheduler, recipe.cache, limits, recipe.speculation, depth, costs)
    beside = decoder, cache, scheduler.slots, scheduler.max_batch_tokens, recipe
    drafter = None if draft is None else drafter_of(draft, *beside)
    masks = MaskMaker(waits=config.num_recurrent > 0)  # a state that has taken a token in keeps it
    parts = decoder, cache, decoder.attention, _sampler(decoder, world, masks), scheduler.slots
    runner = (ModelRunner if depth == 1 else StageRunner)(*parts, drafter)
    leaves_out = masks if config.num_recurrent else None
    engine = Engine(scheduler, runner, clock, overlap=recipe.scheduler.overlap, masks=leaves_out)
    experts = _experts(recipe, decoder)
    captured_bytes = _first_steps(recipe, runner, scheduler.max_batch_tokens, tell)
    world.meet("the meeting after compiling")  # then the time of the largest step includes no wait
    tell("running its largest step")
    memory, largest_step_s = _measure(recipe, config, memory, engine, runner, machine, world, captured_bytes)
    machine.settle(runner)
    tell("")
    world.meet("the meeting before the first step")
    if experts is not None:
        experts.restart()
    _log(recipe, config, memory, decoder, machine)
    limits = _within(limits, memory)
    facts = facts_of(recipe.scheduler, recipe.cache, limits, recipe.speculation, depth, costs)
    live = LiveMemory(recipe, engine, runner, memory, world.rank)
    works = live_works(live) | ({} if adapters is None else {ADAPTER: adapter_work(adapters)})
    return BuiltEngine(
        *(engine, runner, config, memory, machine.name, largest_step_s, facts, experts),
        adapters=adapters,
        works=works | _counting(recipe, experts, world, share),
        live=live,
        pages=rank_pages(recipe, config, runner, world, share, machine),
        learned=lambda: machine.learned,
    )


def _joined(world: Group, share: Share, drafts: DecoderConfig | None) -> tuple[Group, StageLinks]:
    """Return the ranks of this rank's stage, and the links to the other stages, which may carry drafts."""
    group, stages = divided(world, share)
    if share.stages > 1 and drafts is not None:
        stages.open_for_drafts(world, share)
    return group, stages


def _experts(recipe: Recipe, decoder: Decoder) -> ExpertCounts | None:
    """Return the counts of one rank of each stage, whose ranks choose alike, if a recipe asks for them."""
    is_first = decoder.share.tensor == 0
    return ExpertCounts(decoder) if recipe.device.count_experts and is_first else None


def _counting(recipe: Recipe, experts: ExpertCounts | None, world: Group, share: Share) -> dict[str, Work]:
    """Return what stages do when they are asked for their counts."""
    is_asked = recipe.device.count_experts and share.stages > 1
    return {EXPERTS: StageCounts(experts, world, share)} if is_asked else {}


def _limits(config: DecoderConfig, memory: MemoryPlan, drafts: DecoderConfig | None) -> SchedulerLimits:
    """Return the limits of a model and of what drafts for it, with the pools of a plan."""
    most = memory.num_pages, memory.num_host_pages, memory.longest_tokens
    states = memory.num_states, memory.num_host_states
    return SchedulerLimits.of(config, *most, drafts, memory.window_pools, states)


def _within(limits: SchedulerLimits, memory: MemoryPlan) -> SchedulerLimits:
    """Return the limits with the pools of a plan."""
    pages, windows, states = memory.num_pages, memory.window_pools, memory.num_states
    return replace(limits, num_pages=pages, windows=windows, num_states=states)


def _sampler(decoder: Decoder, world: Group, masks: MaskMaker) -> RowSampler | FollowerSampler:
    if world.rank:
        return FollowerSampler()
    config = decoder.config
    return Sampler(config.eos_token_ids, config.vocab_size, decoder.ops, masks)


def _loaded(
    recipe: Recipe,
    config: DecoderConfig,
    memory: MemoryPlan,
    machine: Machine,
    place: tuple[Group, Share, StageLinks],
    tell: Callable[[str], None],
) -> Decoder:
    """Return this rank's part of the decoder, with its weights."""
    group, share, stages = place
    part = share.part(config)
    ops, attention = operators_of(recipe, machine, part, share, group)
    attention.check()
    attention.check_longest(memory.longest_tokens)
    if config.int8_forms:
        ops.check_int8(TORCH_DTYPES[config.dtype], config.int8_forms, part.largest_int8_side)
    if config.kept_form is not None:
        size = config.kept_form.group_size
        ops.check_int4(TORCH_DTYPES[config.dtype], size, largest_side(part), inputs_of_experts(part))
    if recipe.device.graphs:
        most_layers = share.most_layers(config)
        # This refuses sizes that cannot be captured before weights are loaded.
        most_decodes = recipe.scheduler.num_slots if config.num_recurrent else None
        joins = share.tensors > 1
        captured_sizes(attention, *_captured(recipe), most_layers, joins=joins, most_decodes=most_decodes)
    recurrence = None if config.recurrent is None else machine.recurrence(config.recurrent, config.dtype)
    decoder = Decoder(config, ops, attention, group, share, stages, recurrence)
    # Ranks' parts are added up in another order where rows are divided
    decoder.least_divided = 0 if recipe.device.batch_invariant else recipe.parallel.least_divided_tokens
    if recipe.model.weights == "random":
        weights.random(decoder, recipe.model.seed)
    else:
        assert recipe.model.path is not None, "a checkpoint has a path"
        kept = kept_weights(recipe, config, share, "decoder", decoder, tell)
        weights.load(decoder, recipe.model.path, tell, kept)
    drafts = draft_config(recipe, config)
    if isinstance(drafts, HeadConfig) and not share.is_last:
        decoder.tap(drafts.taps)
    return decoder


def _adapters(recipe: Recipe, decoder: Decoder) -> Adapters | None:
    """Return the places for the recipe's adapters, with those loaded that are there from the start."""
    asked = recipe.adapters
    if not asked.most:
        return None
    form = decoder.config.quantization
    if isinstance(form, Described) and form.is_rotated:
        raise RecipeError(
            "adapters.most",
            f"hidden states of the model are rotated (metadata.quarot in {form.file}), and adapters were"
            " trained with others",
            "set it to 0, or use a checkpoint without QuaRot",
            value=asked.most,
        )
    adapters = Adapters(decoder, asked.most, asked.rank)
    for number, (name, folder) in enumerate((asked.folders or {}).items(), 1):
        try:
            files = look_at(ROOT / folder, asked.rank)
            adapters.put(number, adapters.read(files))
            adapters.digests[number] = files.digest
        except (ValueError, OSError) as error:
            raise RecipeError(
                f"adapters.folders.{name}", in_one_line(error), "correct it, or leave it out"
            ) from error
    return adapters


def _planned(
    recipe: Recipe,
    config: DecoderConfig,
    world: Group,
    share: Share,
    machine: Machine,
    ranks_here: int | None,
) -> MemoryPlan:
    """Return the plan with which all ranks start, by the memory that this one has."""
    here = ranks_here or recipe.parallel.ranks_of_a_machine
    memory = plan_memory(
        recipe,
        config,
        machine.memory_bytes(here),
        share=share,
        ranks_here=here,
        tiles_weights=machine.tiles_weights,
    )
    return _least(recipe, config, memory, world, share, machine)


def _least(
    recipe: Recipe,
    config: DecoderConfig,
    memory: MemoryPlan,
    world: Group,
    share: Share,
    machine: Machine,
) -> MemoryPlan:
    """Return the plan with the smallest number of pages that any rank has room for."""
    pages = world.least(memory.num_pages, machine.device)
    host_pages = world.least(memory.num_host_pages, machine.device)
    windows = tuple(
        replace(
            each,
            num_pages=world.least(each.num_pages, machine.device),
            num_host_pages=world.least(each.num_host_pages, machine.device),
        )
        for each in memory.windows
    )
    kept = world.least(memory.num_kept_states, machine.device)
    host_states = world.least(memory.num_host_states, machine.device)
    least = replace(
        memory,
        num_pages=pages,
        num_host_pages=host_pages,
        windows=windows,
        num_kept_states=kept,
        num_host_states=host_states,
    )
    if least == memory:
        return memory
    cache = replace(recipe.cache, num_pages=pages, memory_gib=None, memory_fraction=None)
    activation_bytes = memory.activation_bytes if memory.is_measured else None
    return plan_memory(
        replace(recipe, cache=cache),
        config,
        memory.memory_bytes,
        activation_bytes,
        num_host_pages=host_pages,
        windows=windows,
        num_host_states=host_states,
        num_kept_states=kept,
        share=share,
        ranks_here=memory.ranks_here,
        tiles_weights=machine.tiles_weights,
    )


def _warn_of_checkpoint(recipe: Recipe, config: DecoderConfig) -> None:
    """Log what a checkpoint's files say without effect here."""
    if unknown := unknown_fields(recipe):
        log.warning("the model's configuration has fields that are not known, without effect: %s", unknown)
    if ends := impossible_ends(recipe, config):
        log.warning("the model's vocabulary lacks the end tokens %s, which are left out", ends)
    if unread := unread_layers(recipe, config):
        log.log(
            logging.INFO if config.family in WITH_MTP else logging.WARNING,
            "the checkpoint has, and this engine does not read: %s",
            unread,
        )


def _check_recording(path: Path) -> None:
    """Raise RecipeError unless a new file can be made there."""
    if path.exists():
        problem, fix = "is there already", "name a new file: a recording is never overwritten"
    elif not path.parent.is_dir():
        problem, fix = f"cannot be made, since there is no directory {path.parent}", "make it first"
    elif not os.access(path.parent, os.W_OK):
        problem, fix = f"cannot be made, since {path.parent} may not be written to", "name another place"
    else:
        return
    raise RecipeError("scheduler.record", f"{path} {problem}", fix, value=path)


def _first_steps(recipe: Recipe, runner: ModelRunner, budget: int, tell: Callable[[str], None]) -> int:
    """Compile and capture what steps need.

    Returns the bytes of device memory that captured graphs hold; raises RecipeError if they cannot be made.
    """
    tell("compiling and running its first steps")
    captured_bytes, graphs = 0, recipe.device.graphs
    try:
        warm_up(runner, budget)
        if graphs:
            tell("capturing graphs")
            captured_bytes = _capture(recipe, runner)
    except torch.OutOfMemoryError as error:
        keys = ("device.graphs", "cache.reserve_gib") if graphs else ("cache.reserve_gib",)
        # The figures of torch's allocator stand in brackets behind it.
        said = first_line(error).partition(" (")[0]
        problem = f"the first steps find no room beside the weights and the cache ({said})"
        fix = f"{'lower it, or ' if graphs else ''}raise cache.reserve_gib or lower cache.memory_fraction"
        raise RecipeError(keys, problem, fix, value=graphs or recipe.cache.reserve_gib) from error
    tell("")
    return captured_bytes


def _capture(recipe: Recipe, runner: ModelRunner) -> int:
    """Capture the steps of a recipe; returns the bytes of device memory that their graphs hold."""
    try:
        return capture(runner, *_captured(recipe))
    except RuntimeError as error:
        # Of several ranks one may be lost, which `Ranks.building` tells
        if isinstance(error, torch.OutOfMemoryError) or recipe.parallel.ranks > 1:
            raise
        problem = f"steps cannot be captured here ({first_line(error)})"
        fix = "set it to 0; `bash scripts/verify_npu.sh` shows which operator refuses"
        raise RecipeError("device.graphs", problem, fix, value=recipe.device.graphs) from error


def _measure(
    recipe: Recipe,
    config: DecoderConfig,
    estimated: MemoryPlan,
    engine: Engine,
    runner: ModelRunner,
    machine: Machine,
    world: Group,
    captured_bytes: int,
) -> tuple[MemoryPlan, float]:
    """Run the largest step, and plan again if it and the captured graphs take more memory than was estimated.

    Returns the plan, and the duration of that step in seconds. A smaller figure does not change the plan: an
    earlier engine of this process may have left memory that is used again and does not show.
    """
    budget = engine.scheduler.max_batch_tokens
    start_s = time.perf_counter()
    measured = largest_step_bytes(runner, budget)
    step_s = time.perf_counter() - start_s
    if measured is not None and (most_sampled := recipe.speculation.most_sampled) > 1:
        measured = max(measured, largest_step_bytes(runner, budget, most_sampled) or 0)
    memory = estimated
    if measured is not None and measured + captured_bytes > estimated.activation_bytes:
        memory = plan_memory(
            recipe,
            config,
            machine.memory_bytes(estimated.ranks_here),
            measured + captured_bytes,
            num_host_pages=estimated.num_host_pages,  # these are allocated already, and stay
            window_host_pages=[each.num_host_pages for each in estimated.windows],
            num_host_states=estimated.num_host_states,
            share=runner.decoder.share,
            ranks_here=estimated.ranks_here,
            tiles_weights=machine.tiles_weights,
        )
        memory = replace(memory, host_because=estimated.host_because)
    memory = _least(recipe, config, memory, world, runner.decoder.share, machine)
    further = memory.further_pools
    if (memory.num_pages, further) != (estimated.num_pages, estimated.further_pools):
        engine.resize(memory.num_pages, window_pages=further)
        warm_up(runner, budget)
    return memory, step_s


def _captured(recipe: Recipe) -> tuple[int, int]:
    """Return the most tokens of a captured step, and of a row of it."""
    width = recipe.speculation.most_sampled
    return min(recipe.device.graphs, recipe.scheduler.num_slots * width), width


def _log(
    recipe: Recipe, config: DecoderConfig, memory: MemoryPlan, decoder: Decoder, machine: Machine
) -> None:
    log.info("device: %s", machine.name)
    ops, attention = decoder.ops, decoder.attention
    lines = dict(report(recipe, config, memory, decoder.share))
    log.info("model: %s, weights %s (%s)", lines["model"], lines["weights"], recipe.model.weights)
    log.info("cache: %s pages of %s, %s", f"{memory.num_pages:,}", lines["a page"], lines["cache"])
    for line in overridden_fields(recipe):
        log.info("model.config_overrides: %s", line)
    for line in told_by_weights(recipe):
        log.info("weights: %s", line)
    if memory.host_because:
        log.info("host tier: %s", lines["host tier"])
    section, sources = completed(recipe.scheduler, memory.longest_tokens)
    for key, source in sources.items():
        log.info("scheduler.%s: %s, %s", key, getattr(section, key), source)
    log.info("operators of %s: %s", type(ops).__name__, _overridden(ops, Ops))
    log.info("attention of %s: %s", type(attention).__name__, _overridden(attention, Attention))


def _overridden(operators: object, plain: type) -> str:
    """Return which of the plain operators a device overrides, in words."""
    names = [name for name in vars(plain) if name[0] != "_" and callable(getattr(plain, name))]
    overridden = [
        name
        for name in names
        if getattr(getattr(operators, name), "__func__", None) is not getattr(plain, name)
    ]
    return f"fused are {', '.join(overridden)}" if overridden else "all plain torch"
