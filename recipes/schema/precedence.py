"""Let keys of a recipe give way to what a later place sets.

A recipe comes from up to four places: a base, the file, a profile and the command line. A later place
replaces the keys that it sets itself. This module also removes keys of earlier places that contradict it:
another of several alternatives, a key that the chosen policy does not read, or a step that is too small for
it. Contradictions within one place remain, and are refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipes.schema import scheduler_section, speculation_section
from recipes.schema.recipe_error import RecipeError, in_words
from recipes.schema.scheduler_section import WHOLE

BASE, FILE, PROFILE, COMMAND_LINE = range(4)
ALTERNATIVES = (
    ("model.path", "model.config"),
    ("cache.num_pages", "cache.memory_gib", "cache.memory_fraction"),
)
# Keys of a section that are read only with some values of others, and what they are where nobody sets them
CONDITIONS = (
    ("scheduler", scheduler_section.READ_WHERE, scheduler_section.UNSAID),
    ("speculation", speculation_section.READ_WHERE, speculation_section.UNSAID),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and the place that set it.

    `number` orders the overrides of the command line. `note` says what the entry replaced, or gave way to. A
    value that cannot be read is the RecipeError that is raised if nothing replaces it.
    """

    value: Any
    place: str  # recipes/tiny/cpu.yaml:7, or command line: cache.page_size=32
    level: int  # BASE, FILE, PROFILE or COMMAND_LINE
    number: int = 0
    note: str = ""

    @property
    def origin(self) -> str:
        """The place that the value comes from, in words."""
        return self.place + self.note

    def giving_way(self, to: str, value: Any, level: int) -> Entry:
        """Return the entry with `value` in place of its own, because of a key that a later place set."""
        said = self.value.value if isinstance(self.value, RecipeError) else self.value
        note = f" said {in_words(said)}, which gives way to {to}"
        return replace(self, value=value, level=level, note=note)


def settled(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries after those of earlier places have given way."""
    kept = dict(entries)
    for names in ALTERNATIVES:
        _settle_alternatives(kept, names)
    _settle_unread(kept)
    _settle_host(kept)
    _settle_step(kept)
    return kept


def _settle_alternatives(entries: dict[str, Entry], names: tuple[str, ...]) -> None:
    said = [name for name in names if name in entries and entries[name].value is not None]
    last = max((entries[name].level for name in said), default=BASE)
    winners = [name for name in said if entries[name].level == last]
    for name in said:
        if name not in winners:
            winner, old = entries[winners[0]], entries[name]
            note = f"{winner.note}, in place of {name} ({old.place})"
            entries[winners[0]] = replace(winner, note=note)
            entries[name] = old.giving_way(winners[0], None, last)


def _settle_host(entries: dict[str, Entry]) -> None:
    """Drop the share that bounds a host tier where a later place sets the tier's size."""
    size, share = entries.get("cache.host_gib"), entries.get("cache.host_fraction")
    if size is not None and share is not None and share.value is not None and share.level < size.level:
        entries["cache.host_fraction"] = share.giving_way("cache.host_gib", None, size.level)


def _settle_unread(entries: dict[str, Entry]) -> None:
    """Drop keys that are not read with the policy, chunking, order or drafts that a later place chose."""
    for section, read_where, unsaid in CONDITIONS:
        for leaf, conditions in read_where.items():
            for other, values in conditions.items():
                old, choice = entries.get(f"{section}.{leaf}"), entries.get(f"{section}.{other}")
                if old is None or choice is None or old.level >= choice.level or choice.value in values:
                    continue
                if old.value not in (None, unsaid[leaf]):
                    to = f"{section}.{other} {in_words(choice.value).strip(chr(39))}"
                    entries[f"{section}.{leaf}"] = old.giving_way(to, unsaid[leaf], choice.level)
    number = entries.get("scheduler.max_long_prefills")
    length = entries.get("scheduler.long_prompt_tokens")
    if number is None or length is None or number.value is not None or length.value is None:
        return
    if length.level < number.level:  # long_prompt_tokens is read only together with max_long_prefills
        to = "scheduler.max_long_prefills null"
        entries["scheduler.long_prompt_tokens"] = length.giving_way(to, None, number.level)


def _settle_step(entries: dict[str, Entry]) -> None:
    """Drop a step's budget that a later place's policy of whole prompts may find too small.

    Where the longest request is not set, it depends on the model, which is not known here.
    """
    policy, budget, longest = (
        entries.get(f"scheduler.{each}") for each in ("policy", "max_batch_tokens", "max_request_tokens")
    )
    if policy is None or budget is None or policy.value not in WHOLE or budget.level >= policy.level:
        return
    if budget.value is None or (
        longest is not None and longest.value is not None and longest.value <= budget.value
    ):
        return
    entries["scheduler.max_batch_tokens"] = budget.giving_way(
        f"scheduler.policy {policy.value}", None, policy.level
    )
