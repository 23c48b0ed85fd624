"""How does a recipe become a scheduler? No model and no device is needed for it."""

from __future__ import annotations

from dataclasses import dataclass

from continuous_batching.policies.policy import Policy
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.policies.static import Static
from continuous_batching.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.victims import Victim, fewest_lost, lowest_priority, youngest
from kv_cache.pages import PagePool
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


def policy(asked: SchedulerSection) -> Policy:
    """The way of batching that a recipe names."""
    if asked.policy == "static":
        assert asked.batch_size is not None, "a recipe with the static policy has a batch size"
        assert asked.max_wait_ms is not None, "a recipe with the static policy bounds the wait"
        return Static(asked.batch_size, asked.max_wait_ms / 1000)
    return StallFree()
