"""How does a recipe become a proposer of drafts? This needs no model and no device."""

from __future__ import annotations

from collections.abc import Callable

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Lengths
from continuous_batching.speculation.ngram import NGram
from continuous_batching.speculation.proposer import Proposer
from continuous_batching.speculation.speculation import Speculation
from recipes.schema.speculation_section import SpeculationSection

PROPOSERS: dict[str, Callable[[SlotPool], Proposer]] = {"ngram": NGram}
LENGTHS: dict[str, Callable[[], Lengths]] = {"fixed": Fixed}


def speculation_of(asked: SpeculationSection, slots: SlotPool) -> Speculation | None:
    """What gives drafts to the rows of a slot table; None where the recipe wants none."""
    if asked.kind == "none":
        return None
    return Speculation(slots, PROPOSERS[asked.kind](slots), LENGTHS[asked.adaptive](), asked.max_tokens)
