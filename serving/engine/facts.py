"""Collect what the server needs to know of an engine, and the readings of its page tier and its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from continuous_batching.scheduling.validation import longest_allowed
from models.config import needs_long_factors
from models.step.expert_counts import StageCounts
from recipes.assembly.rank_works import EXPERTS
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
        long_factors=needs_long_factors(config.rope, engine.slots.max_tokens),
        adapters=() if built.adapters is None else tuple(built.adapters.digests.values()),
    )


READ_S = 10.0  # interval between readings, each of which waits for the steps in flight


class ExpertReadings:
    """The readings of an engine that counts its experts; an engine that does not has none.

    Stages of layers read theirs between two steps, and what they have found is returned once all have.
    """

    def __init__(self, built: BuiltEngine) -> None:
        self._built, self._due_s = built, 0.0
        self._asked: tuple[str, int] | None = None  # the reading that stages make, and the steps before it

    def due(self, now_s: float) -> ExpertTable | None:
        """Return a new reading if one is due."""
        built = self._built
        counts, mixture, work = built.experts, built.config.mixture, built.works.get(EXPERTS)
        if counts is None or mixture is None:
            return None
        steps = built.engine.scheduler.counters.steps
        if isinstance(work, StageCounts):
            return self._of_stages(work, now_s, steps, mixture.num_chosen)
        if now_s < self._due_s:
            return None
        self._due_s = now_s + READ_S
        return ExpertTable(counts.read(), mixture.num_chosen, steps)

    def _of_stages(self, work: StageCounts, now_s: float, steps: int, num_chosen: int) -> ExpertTable | None:
        if self._asked is not None:
            name, asked_steps = self._asked
            found = work.collected(name)
            if found is None:
                return None
            self._asked = None
            return ExpertTable(found, num_chosen, asked_steps)
        if now_s >= self._due_s and self._built.questions is not None:
            self._due_s = now_s + READ_S
            self._asked = str(steps), steps
            self._built.questions.decide(EXPERTS, str(steps), is_agreed=True)
        return None
