"""Build a scheduler from a recipe, with the prior of its steps' times; this needs no model and no device."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.policy import ALL, Policy
from continuous_batching.policies.prefill_budget import (
    AdaptiveChunks,
    Chunks,
    FixedChunks,
    LongPrompts,
    StagedChunks,
)
from continuous_batching.queueing import (
    Aged,
    EarliestDeadline,
    FairShare,
    QueueLimits,
    QueueOrder,
    WaitingQueue,
    shortest_first,
)
from continuous_batching.scheduling.preemption import Victim, fewest_lost, lowest_priority, youngest
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import UNKNOWN, Coefficients, StepCosts, StepTime
from devices.rates import DeviceRates, named, names
from kv_cache.groups import BesideGroup, WindowGroup
from kv_cache.pages import PagePool
from kv_cache.states import StateGroup
from models import cost
from models.config import DecoderConfig
from recipes.assembly.speculation import speculation_of
from recipes.schema.checks import contradictions
from recipes.schema.keys import keys_of
from recipes.schema.recipe import CacheSection, Recipe
from recipes.schema.scheduler_defaults import completed, longest_request
from recipes.schema.scheduler_section import SchedulerSection
from recipes.schema.speculation_section import SpeculationSection

if TYPE_CHECKING:
    from models.parallel.group import Group
    from recipes.machine import Machine

Value = TypeVar("Value")

VICTIMS: dict[str, Victim] = {
    "youngest": youngest,
    "fewest_lost": fewest_lost,
    "lowest_priority": lowest_priority,
}


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the model and the memory add to the numbers of a recipe."""

    num_pages: int
    num_host_pages: int
    longest_tokens: int  # most tokens of a request, prompt and answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_shared_tokens: int | None  # most tokens of a prompt that shares pages (see Scheduler)
    # Each group of layers with a window has its size, its pages, and its pages in the host's memory
    windows: tuple[tuple[int, int, int], ...] = ()
    num_states: int = 0  # recurrent states, including the null one; 0: the model has none
    num_host_states: int = 0

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        num_pages: int,
        num_host_pages: int,
        longest_tokens: int,
        draft: DecoderConfig | None = None,
        windows: tuple[tuple[int, int, int], ...] = (),
        num_states: tuple[int, int] = (0, 0),
    ) -> SchedulerLimits:
        """Return the limits for this model, with the draft model beside it, and a cache of this size.

        `num_states` are those on the device and on the host.
        """
        shared = [config.max_shared_positions, None if draft is None else draft.max_shared_positions]
        return cls(
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            longest_tokens=longest_tokens,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            max_shared_tokens=min((each for each in shared if each is not None), default=None),
            windows=windows,
            num_states=num_states[0],
            num_host_states=num_states[1],
        )


NO_SPECULATION = SpeculationSection()


def scheduler_of(
    asked: SchedulerSection,
    cache: CacheSection,
    limits: SchedulerLimits,
    speculation: SpeculationSection = NO_SPECULATION,
    depth: int = 1,
    step_costs: StepCosts = UNKNOWN,
) -> Scheduler:
    """Return an empty scheduler, for a model in `depth` pipeline stages whose steps cost `step_costs`."""
    longest_tokens = longest_request(asked, limits.longest_tokens)
    asked = completed(asked, longest_tokens).section
    slots, step_time = SlotPool(asked.num_slots, longest_tokens, cache.page_size), StepTime(step_costs)
    pool = PagePool(limits.num_pages)
    host_pool = PagePool(limits.num_host_pages) if limits.num_host_pages else None
    return Scheduler(
        slots,
        pool,
        policy(asked, step_time),
        waiting=waiting(asked, slots),
        limits=QueueLimits(
            max_waiting_requests=asked.max_waiting_requests or ALL,
            max_waiting_tokens=asked.max_waiting_tokens or ALL,
            max_queue_wait_s=asked.max_queue_wait_s or math.inf,
        ),
        outrank=asked.outrank,
        victim=VICTIMS[asked.victim],
        host_pool=host_pool,
        has_tier=cache.tier is not None and limits.num_host_pages > 0,
        max_batch_tokens=_said(asked.max_batch_tokens),
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        speculation=speculation_of(speculation, slots, step_time),
        step_time=step_time if _predicts(asked, speculation) else None,
        prefix_sharing=cache.prefix_sharing,
        max_shared_tokens=limits.max_shared_tokens,
        compact_every_steps=cache.compact_every_steps,
        compact_pages_per_step=cache.compact_pages_per_step,
        seed=asked.seed,
        depth=depth,
        groups=_groups(limits, slots),
    )


def _groups(limits: SchedulerLimits, slots: SlotPool) -> list[BesideGroup]:
    """Return the groups of layers that see a window, and then that of layers with a state."""
    entries, size, num_rows = (limits.num_pages, limits.num_host_pages), slots.page_size, slots.num_slots
    groups: list[BesideGroup] = []
    for number, (window, num_pages, num_host_pages) in enumerate(limits.windows, 1):
        pools = PagePool(num_pages), PagePool(num_host_pages) if num_host_pages else None
        groups.append(WindowGroup(number, window, size, num_rows, slots.max_pages, *pools, *entries))
    if limits.num_states:
        host = PagePool(limits.num_host_states) if limits.num_host_states else None
        pool = PagePool(limits.num_states)
        groups.append(StateGroup(len(groups) + 1, size, num_rows, pool, host, *entries))
    return groups


def costs_of(recipe: Recipe, config: DecoderConfig, machine: Machine, world: Group) -> StepCosts:
    """Return the costs by the profile of the machine; `UNKNOWN` where it has none.

    All ranks return the same, because they must decide the same steps: where their devices have different
    profiles, nothing is known.
    """
    profiles, name = names(), named(machine.name)
    number = -1 if name is None else profiles.index(name)
    least, most = world.least(number, machine.device), -world.least(-number, machine.device)
    return costs_on(recipe, config, DeviceRates.load(profiles[number])) if least == most >= 0 else UNKNOWN


def costs_on(
    recipe: Recipe,
    config: DecoderConfig,
    device: DeviceRates,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> StepCosts:
    """Return the costs on so many of these devices, by default as many as the recipe says."""
    asked, drafts, parallel = recipe.scheduler, recipe.speculation, recipe.parallel
    width = 1 if drafts.kind == "none" else 1 + drafts.max_tokens
    stage = cost.ModelPart(config.num_layers // (pipeline or parallel.pipeline), has_head=True)
    most_tokens = asked.max_batch_tokens or asked.num_slots
    of_ranks = parallel.context, parallel.least_divided_tokens
    counts = cost.Counts(config, tensor or parallel.tensor, stage, *of_ranks)
    return cost.step_costs(counts, device, asked.num_slots * width, most_tokens, graphs=recipe.device.graphs)


def facts_of(
    asked: SchedulerSection,
    cache: CacheSection,
    limits: SchedulerLimits,
    speculation: SpeculationSection = NO_SPECULATION,
    depth: int = 1,
    step_costs: StepCosts = UNKNOWN,
) -> dict[str, Any]:
    """Return what a scheduler is made of, defaults included, as plain values for a recording's header."""
    asked = completed(asked, longest_request(asked, limits.longest_tokens)).section
    scheduler = {name: value for name, value in asdict(asked).items() if name != "record"}
    drafts = {name: value for name, value in asdict(speculation).items() if not name.startswith("draft_")}
    pages = {name: value for name, value in asdict(cache).items() if not name.startswith("events")}
    return {
        "scheduler": scheduler,
        "cache": pages,  # whether and where its events are published decides nothing here
        "speculation": drafts,  # the draft model's own keys decide nothing here
        "limits": asdict(limits),
        "depth": depth,
        "step_costs": asdict(step_costs),
    }


def _predicts(asked: SchedulerSection, speculation: SpeculationSection) -> bool:
    """Whether a decision depends on the predicted time of a step."""
    drafts = speculation.kind != "none" and speculation.adaptive == "throughput"
    return drafts or asked.chunk == "adaptive"


def scheduler_from(facts: dict[str, Any]) -> Scheduler:
    """Return the scheduler of a recording's header; raises ValueError if another version wrote it."""
    try:
        asked, cache = SchedulerSection(**facts["scheduler"]), CacheSection(**facts["cache"])
        speculation = SpeculationSection(**facts["speculation"])
        given = facts["limits"]
        windows = tuple((window, pages, host) for window, pages, host in given.get("windows", ()))
        limits = SchedulerLimits(
            **{**given, "eos_token_ids": tuple(given["eos_token_ids"]), "windows": windows}
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the recording is of another version: {error}; replay it with that version"
        ) from error
    for section, values in (("scheduler", asked), ("cache", cache), ("speculation", speculation)):
        for key in keys_of(type(values), f"{section}."):
            key.check(getattr(values, key.name.partition(".")[2]))
    for problem in contradictions(asked):
        raise problem
    costs = UNKNOWN
    if found := facts.get("step_costs"):
        costs = StepCosts(Coefficients(**found["decodes"]), Coefficients(**found["prompts"]))
    elif asked.chunk == "adaptive":  # drafts are recorded, but chunks are sized anew
        raise ValueError(
            "the recording is of another version, which predicted the time of a step otherwise, and"
            " scheduler.chunk is adaptive; replay it with that version"
        )
    return scheduler_of(asked, cache, limits, speculation, facts.get("depth", 1), costs)


def policy(asked: SchedulerSection, step_time: StepTime) -> Policy:
    """Return the batching policy that a completed section names."""
    long_prompts = None
    if asked.max_long_prefills is not None:
        long_prompts = LongPrompts(asked.max_long_prefills, _said(asked.long_prompt_tokens))
    match asked.policy:
        case "stall_free":
            return StallFree(chunks(asked, step_time), long_prompts)
        case "split":
            prompt_tokens = int(_said(asked.prompt_share) * _said(asked.max_batch_tokens))
            return Split(prompt_tokens, chunks(asked, step_time), long_prompts)
        case "prefill_first":
            return PrefillFirst()
        case "orca":
            return Orca()
        case "static":
            return Static(_said(asked.batch_size), _said(asked.max_wait_ms) / 1000)


def chunks(asked: SchedulerSection, step_time: StepTime) -> Chunks | None:
    """Return how long a prompt's chunks are; None: as long as the budget allows."""
    if asked.chunk == "fixed":
        return None if asked.chunk_tokens is None else FixedChunks(asked.chunk_tokens)
    least, most = _said(asked.min_chunk_tokens), _said(asked.max_chunk_tokens)
    tile = _said(asked.tile_tokens)
    if asked.chunk == "dynamic":
        return StagedChunks(least, most, _said(asked.chunk_stages), _said(asked.staged_tokens), tile)
    return AdaptiveChunks(step_time, _said(asked.target_itl_ms) / 1000, least, most, tile)


def waiting(asked: SchedulerSection, slots: SlotPool) -> WaitingQueue:
    """Return an empty queue in the order that a recipe names."""
    shares = FairShare(slots, asked.tenant_weights or {}) if asked.fair_tenants else None
    return WaitingQueue(order(asked), shares, asked.long_prompt_tokens or ALL)


def order(asked: SchedulerSection) -> QueueOrder | None:
    """Return the order in which requests are admitted; None: by arrival."""
    match asked.queue:
        case "fcfs":
            return None
        case "sjf":
            return shortest_first
        case "priority":
            return Aged(_said(asked.priority_s), _said(asked.length_s))
        case "deadline":
            return EarliestDeadline(_said(asked.deadline_s))


def _said(value: Value | None) -> Value:
    """Return the value of a key that a completed section has."""
    assert value is not None, "the section has not been completed"
    return value
