"""Compute the defaults of scheduler keys that a recipe leaves out.

A default may depend on other keys: a static batch is as large as the slot table. So every policy works when
only its name is given. `python -m recipes show` and the engine's log say which defaults were taken, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from recipes.schema.scheduler_section import LEAST_SHARE, MOST_SHARE, WHOLE, SchedulerSection

ASKED = "scheduler.max_request_tokens"
LONGEST_STEP = 8192  # tokens; start-up computes a step of this length, which takes a while


class Completed(NamedTuple):
    """A section with its defaults filled in, and the reason for each default by key."""

    section: SchedulerSection
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class Default:
    """The default of `key` where `other` has one of the values `chosen`.

    `value` computes it from the section; None means that there is no sensible default.
    """

    key: str
    other: str
    chosen: tuple[str, ...]
    value: Callable[[SchedulerSection], float | None]
    source: str = ""


def completed(asked: SchedulerSection, longest_tokens: int | None = None) -> Completed:
    """Return the section with every default that can be known.

    `longest_tokens`, the length of the longest request, sets how long a step of whole prompts is.
    """
    sources: dict[str, str] = {}
    longest_tokens = asked.max_request_tokens if longest_tokens is None else longest_tokens
    if asked.max_batch_tokens is None and asked.policy in WHOLE and longest_tokens is not None:
        most = LONGEST_STEP if asked.max_request_tokens is None else longest_tokens
        asked = replace(asked, max_batch_tokens=max(asked.num_slots, min(longest_tokens, most)))
        longest = f"the longest request, up to {most} tokens" if asked.max_request_tokens is None else ASKED
        sources["max_batch_tokens"] = f"default of {asked.policy}: {longest}"
    for each in DEFAULTS:
        chosen = getattr(asked, each.other)
        if chosen in each.chosen and getattr(asked, each.key) is None:
            value = each.value(asked)
            if value is not None:
                change: dict[str, Any] = {each.key: value}
                asked = replace(asked, **change)
                sources[each.key] = f"default of {chosen}" + (f": {each.source}" if each.source else "")
    return Completed(asked, sources)


def longest_request(asked: SchedulerSection, longest_tokens: int) -> int:
    """Return the most tokens of a request under the policy, where model and cache allow `longest_tokens`."""
    step_tokens = completed(asked, longest_tokens).section.max_batch_tokens
    if asked.policy in WHOLE and asked.max_request_tokens is None and step_tokens is not None:
        return min(longest_tokens, step_tokens)
    return longest_tokens


def _prompt_share(asked: SchedulerSection) -> float | None:
    """Return a share of the budget for prompts that leaves one decode for each slot.

    It is nudged upwards where rounding down would lose a prompt token. None means that no allowed share does
    so.
    """
    if asked.max_batch_tokens is None or asked.max_batch_tokens <= asked.num_slots:
        return None
    prompt_tokens = asked.max_batch_tokens - asked.num_slots
    share = prompt_tokens / asked.max_batch_tokens
    if int(share * asked.max_batch_tokens) < prompt_tokens:
        share = math.nextafter(share, 1)
    return min(share, MOST_SHARE) if share >= LEAST_SHARE else None


def _eighth(asked: SchedulerSection) -> int | None:
    return None if asked.max_chunk_tokens is None else max(1, asked.max_chunk_tokens // 8)


def _tile(asked: SchedulerSection) -> int | None:
    if asked.max_chunk_tokens is None or asked.tile_tokens is None:
        return None
    return min(asked.tile_tokens, asked.max_chunk_tokens)


def _staged_tokens(asked: SchedulerSection) -> int | None:
    if asked.max_chunk_tokens is None or asked.chunk_stages is None:
        return None
    return asked.chunk_stages * asked.max_chunk_tokens


DEFAULTS = (  # a default may depend on those before it
    Default("batch_size", "policy", ("static",), lambda asked: asked.num_slots, "scheduler.num_slots"),
    Default("max_wait_ms", "policy", ("static",), lambda _: 100.0),
    Default("prompt_share", "policy", ("split",), _prompt_share, "what one decode for each slot leaves"),
    Default(
        "max_chunk_tokens",
        "chunk",
        ("dynamic", "adaptive"),
        lambda asked: asked.max_batch_tokens,
        "scheduler.max_batch_tokens",
    ),
    Default("tile_tokens", "chunk", ("dynamic", "adaptive"), lambda _: 32),
    Default("min_chunk_tokens", "chunk", ("dynamic",), _eighth, "an eighth of scheduler.max_chunk_tokens"),
    Default("min_chunk_tokens", "chunk", ("adaptive",), _tile, "scheduler.tile_tokens"),
    Default("chunk_stages", "chunk", ("dynamic",), lambda _: 4),
    Default(
        "staged_tokens",
        "chunk",
        ("dynamic",),
        _staged_tokens,
        "scheduler.chunk_stages times scheduler.max_chunk_tokens",
    ),
    Default("target_itl_ms", "chunk", ("adaptive",), lambda _: 50.0),
    Default("priority_s", "queue", ("priority",), lambda _: 10.0),
    Default("length_s", "queue", ("priority",), lambda _: 1.0),
)
