"""How does a recipe become a scheduler? No model and no device is needed for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from continuous_batching.policies.policy import Policy
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.policies.static import Static
from continuous_batching.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.victims import Victim, fewest_lost, lowest_priority, youngest
from kv_cache.pages import PagePool
from recipes.keys import keys_of
from recipes.recipe import CacheSection, SchedulerSection

VICTIMS: dict[str, Victim] = {
    "youngest": youngest,
    "fewest_lost": fewest_lost,
    "lowest_priority": lowest_priority,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What model and memory add to the numbers of a recipe."""

    num_pages: int
    num_host_pages: int
    longest_tokens: int  # of a request, prompt and answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_shared_tokens: int | None  # see Scheduler


def scheduler_of(asked: SchedulerSection, cache: CacheSection, limits: Limits) -> Scheduler:
    """An empty scheduler."""
    return Scheduler(
        SlotPool(asked.num_slots, limits.longest_tokens, cache.page_size),
        PagePool(limits.num_pages),
        policy(asked),
        victim=VICTIMS[asked.victim],
        host_pool=PagePool(limits.num_host_pages) if limits.num_host_pages else None,
        max_batch_tokens=asked.max_batch_tokens,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        prefix_sharing=cache.prefix_sharing,
        max_shared_tokens=limits.max_shared_tokens,
        compact_every_steps=cache.compact_every_steps,
        compact_pages_per_step=cache.compact_pages_per_step,
        seed=asked.seed,
    )


def facts_of(asked: SchedulerSection, cache: CacheSection, limits: Limits) -> dict[str, Any]:
    """All that a scheduler is made of, as plain values: for a recording's header."""
    scheduler = {name: value for name, value in asdict(asked).items() if name != "record"}
    return {"scheduler": scheduler, "cache": asdict(cache), "limits": asdict(limits)}


def scheduler_from(facts: dict[str, Any]) -> Scheduler:
    """The scheduler of these facts; raises ValueError for those of another version of this project."""
    try:
        asked, cache = SchedulerSection(**facts["scheduler"]), CacheSection(**facts["cache"])
        limits = Limits(**{**facts["limits"], "eos_token_ids": tuple(facts["limits"]["eos_token_ids"])})
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the recording is of another version: {error}; replay it with that version"
        ) from error
    for section, values in (("scheduler", asked), ("cache", cache)):
        for key in keys_of(type(values), f"{section}."):
            key.check(getattr(values, key.name.partition(".")[2]))
    return scheduler_of(asked, cache, limits)


def policy(asked: SchedulerSection) -> Policy:
    """The way of batching that a recipe names."""
    if asked.policy == "static":
        assert asked.batch_size is not None, "a recipe with the static policy has a batch size"
        assert asked.max_wait_ms is not None, "a recipe with the static policy bounds the wait"
        return Static(asked.batch_size, asked.max_wait_ms / 1000)
    return StallFree()
