"""Collect what the server needs to know of an engine, and the readings of its page tier and its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from continuous_batching.scheduling.validation import longest_allowed
from serving.engine.messages import EngineFacts, ExpertTable, TierReading
from serving.engine.silence import COMPILER_S, SHORTEST_S

if TYPE_CHECKING:
    from kv_cache.tier.page_tier import PageTier
    from recipes.assembly.engine import BuiltEngine


def tier_reading(tier: PageTier | None) -> TierReading | None:
    """Return the counters and the health of a page tier, or None without a tier."""
    return None if tier is None else TierReading(tier.counters, tier.is_well)


def facts_of(built: BuiltEngine, *, prefix_sharing: bool) -> EngineFacts:
    """Return what the server needs to know of an engine."""
    engine, config, memory = built.engine, built.config, built.memory
    scheduler = engine.scheduler
    shortest_s = SHORTEST_S if built.runner.attention.device.type == "cpu" else COMPILER_S
    return EngineFacts(
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_tokens=longest_allowed(engine.slots, scheduler.pool),
        num_slots=engine.slots.num_slots,
        num_pages=memory.num_pages,
        page_size=engine.slots.page_size,
        page_bytes=memory.page_bytes,
        further_page_bytes=memory.further_page_bytes,
        num_host_pages=memory.num_host_pages,
        device=built.device_name,
        parameters=config.num_parameters,
        max_batch_tokens=scheduler.max_batch_tokens,
        prefix_sharing=prefix_sharing,
        max_shared_tokens=config.max_shared_positions,
        expected_step_s=max(shortest_s, built.largest_step_s),
        hidden_size=config.hidden_size,
    )


READ_S = 10.0  # interval between readings, each of which waits for the steps in flight


class ExpertReadings:
    """The readings of an engine that counts its experts; an engine that does not has none."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built, self._due_s = built, 0.0

    def due(self, now_s: float) -> ExpertTable | None:
        """Return a new reading if one is due."""
        counts, mixture = self._built.experts, self._built.config.mixture
        if counts is None or mixture is None or now_s < self._due_s:
            return None
        self._due_s = now_s + READ_S
        steps = self._built.engine.scheduler.counters.steps
        return ExpertTable(counts.read(), mixture.num_chosen, steps)
