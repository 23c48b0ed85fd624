"""Build the proposer of drafts from a recipe; this needs no model and no device."""

from __future__ import annotations

from collections.abc import Callable

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Lengths, Source, Throughput
from continuous_batching.speculation.proposer import (
    DraftModel,
    DraftSpans,
    NGram,
    Proposer,
    head_spans,
    model_spans,
)
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.speculation.suffix import Suffix
from continuous_batching.step_time import StepTime
from recipes.schema.speculation_section import SpeculationSection

PROPOSERS: dict[str, Callable[[SlotPool], Proposer]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "draft": lambda slots: DraftModel(),
    "eagle3": lambda slots: DraftModel(),
    "mtp": lambda slots: DraftModel(),
}
# What the device computes for drafts, for the kinds whose drafts it makes.
ON_DEVICE: dict[str, DraftSpans] = {"draft": model_spans, "eagle3": head_spans, "mtp": head_spans}
WINDOW = 100  # default of speculation.window


def lengths_of(asked: SpeculationSection, slots: SlotPool, step_time: StepTime) -> Lengths:
    """Return the rule that chooses how many drafts are verified, as the recipe asks."""
    if asked.adaptive == "throughput":
        return Throughput(slots, step_time)
    if asked.adaptive == "fixed":
        return Fixed()
    base = asked.max_tokens if asked.base_tokens is None else asked.base_tokens
    least = 1 if asked.min_tokens is None else asked.min_tokens
    return Source(base, min(least, base), asked.max_tokens, asked.window or WINDOW)


def speculation_of(asked: SpeculationSection, slots: SlotPool, step_time: StepTime) -> Speculation | None:
    """Return what gives drafts to the rows of a slot table; None where the recipe wants none."""
    if asked.kind == "none":
        return None
    proposer, lengths = PROPOSERS[asked.kind](slots), lengths_of(asked, slots, step_time)
    return Speculation(slots, proposer, lengths, asked.max_tokens, spans=ON_DEVICE.get(asked.kind))
