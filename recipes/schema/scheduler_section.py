"""Which keys has a recipe for who runs when, and which of them cannot stand together?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipes.schema.keys import RecipeError, in_words, key

_DAY_MS, _MOST_TOKENS = 86_400_000, 2**20
WHOLE = ("orca", "prefill_first")  # policies that compute a prompt in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """Who runs when."""

    policy: Literal["stall_free", "split", "prefill_first", "orca", "static"] = key(
        "stall_free: decodes first, then prompts in chunks; split: the same with a budget for each;"
        " prefill_first: whole prompts, while decodes wait; orca: whole prompts beside the decodes;"
        " static: one batch after the other",
        default="stall_free",
    )
    num_slots: int = key("requests that run at once", least=1, most=2**16)
    max_batch_tokens: int = key("the most tokens computed in one step", least=1, most=_MOST_TOKENS)
    max_request_tokens: int | None = key(
        "the longest request, prompt and answer; null: what model and cache allow",
        default=None,
        least=2,
        most=2**24,
    )
    chunk: Literal["fixed", "dynamic", "adaptive"] = key(
        "stall_free, split: how long a prompt's chunks are; dynamic: shorter as the prompt gets on;"
        " adaptive: as long as `scheduler.target_itl_ms` allows",
        default="fixed",
    )
    chunk_tokens: int | None = key(
        "fixed: the longest chunk; null: what the step's budget leaves",
        default=None,
        least=1,
        most=_MOST_TOKENS,
    )
    min_chunk_tokens: int | None = key(
        "dynamic: the last chunk; adaptive: the tokens of prompts in a step that misses the target",
        default=None,
        least=1,
        most=_MOST_TOKENS,
    )
    max_chunk_tokens: int | None = key(
        "dynamic: the first chunk; adaptive: the most tokens of prompts in a step",
        default=None,
        least=1,
        most=_MOST_TOKENS,
    )
    tile_tokens: int | None = key(
        "dynamic: chunks are a multiple of it; adaptive: steps are; null: 32",
        default=None,
        least=1,
        most=4096,
    )
    chunk_stages: int | None = key(
        "dynamic: chunk lengths from first to last", default=None, least=1, most=1024
    )
    staged_tokens: int | None = key(
        "dynamic: the tokens of a prompt over which the stages go, in equal parts",
        default=None,
        least=1,
        most=2**24,
    )
    target_itl_ms: float | None = key(
        "adaptive: 99 in 100 times between two tokens of a request shall be no longer",
        default=None,
        least=0.1,
        most=_DAY_MS,
    )
    prompt_share: float | None = key(
        "split: the part of `scheduler.max_batch_tokens` that is for prompts",
        default=None,
        least=0.001,
        most=0.999,
    )
    max_long_prefills: int | None = key(
        "stall_free, split: the most long prompts that are computed at once, while short ones overtake them;"
        " null: all go by arrival",
        default=None,
        least=1,
        most=2**16,
    )
    long_prompt_tokens: int | None = key(
        "a prompt of more tokens is long for `scheduler.max_long_prefills`", default=None, least=1, most=2**24
    )
    queue: Literal["fcfs", "sjf", "priority", "deadline"] = key(
        "who is admitted next; fcfs: who came first; sjf: who has the shortest prompt and longest answer;"
        " priority: by waiting time, `priority` and length together; deadline: who is given up first",
        default="fcfs",
    )
    priority_s: float | None = key(
        "priority: the seconds of waiting that one level of `priority` counts like; null: 10",
        default=None,
        least=0,
        most=86_400,
    )
    length_s: float | None = key(
        "priority: the seconds of waiting that 1,000 tokens count against; null: 1",
        default=None,
        least=0,
        most=86_400,
    )
    deadline_s: float | None = key(
        "deadline: where a request without `timeout_s` stands: as if it had this one",
        default=None,
        least=0.001,
        most=86_400,
    )
    outrank: bool = key(
        "priority: who is next preempts running requests of lower `priority` where slots or pages run short",
        default=False,
    )
    fair_tenants: bool = key(
        "tenants take turns by the tokens they were served; `scheduler.queue` orders the requests of each",
        default=False,
    )
    tenant_weights: dict[str, Any] | None = key(
        "fair_tenants: the share of a tenant beside the others, by its name; 1 for those that are not named",
        default=None,
    )
    max_waiting_requests: int | None = key(
        "a request that would be in a longer queue is refused; null: none is",
        default=None,
        least=1,
        most=2**31 - 1,
    )
    max_waiting_tokens: int | None = key(
        "the same by the tokens of the prompts that wait", default=None, least=1, most=2**40
    )
    max_queue_wait_s: float | None = key(
        "a request that was not admitted so long after its arrival ends; null: none does",
        default=None,
        least=0.001,
        most=86_400,
    )
    victim: Literal["youngest", "fewest_lost", "lowest_priority"] = key(
        "who makes room when pages run short: who came last, who loses the fewest computed tokens, or the"
        " lowest `priority`; the oldest request never does",
        default="youngest",
    )
    batch_size: int | None = key("static: requests that start together", default=None, least=1, most=2**16)
    max_wait_ms: float | None = key(
        "static: how long the first of a batch waits for the others", default=None, least=0, most=_DAY_MS
    )
    overlap: bool = key(
        "make the next step while the device is at this one, wherever it can be known; answers stay the same",
        default=False,
    )
    record: Path | None = key(
        "a new file for what the scheduler is told and decides, to be read by `scripts.replay`; it holds"
        " prompts as token ids",
        default=None,
    )
    seed: int = key(
        "seed of the seeds that are drawn for requests without one", default=0, least=0, most=2**63 - 1
    )


# Keys that are read only where another key has one of some values: which, and whether they must be there then
_READ_WHERE: dict[str, tuple[str, tuple[object, ...], bool]] = {
    "batch_size": ("policy", ("static",), True),
    "max_wait_ms": ("policy", ("static",), True),
    "overlap": ("policy", ("stall_free", "split", "prefill_first", "orca"), False),
    "prompt_share": ("policy", ("split",), True),
    "max_long_prefills": ("policy", ("stall_free", "split"), False),
    "chunk_tokens": ("chunk", ("fixed",), False),
    "min_chunk_tokens": ("chunk", ("dynamic", "adaptive"), True),
    "max_chunk_tokens": ("chunk", ("dynamic", "adaptive"), True),
    "tile_tokens": ("chunk", ("dynamic", "adaptive"), False),
    "chunk_stages": ("chunk", ("dynamic",), True),
    "staged_tokens": ("chunk", ("dynamic",), True),
    "target_itl_ms": ("chunk", ("adaptive",), True),
    "priority_s": ("queue", ("priority",), False),
    "length_s": ("queue", ("priority",), False),
    "outrank": ("queue", ("priority",), False),
    "deadline_s": ("queue", ("deadline",), True),
    "tenant_weights": ("fair_tenants", (True,), False),
}


def contradictions(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Keys that each are in range and cannot stand together."""
    yield from _unread(scheduler)
    yield from _too_much(scheduler)
    yield from _uncut(scheduler)
    if (scheduler.max_long_prefills is None) != (scheduler.long_prompt_tokens is None):
        yield _error(
            "max_long_prefills", "and scheduler.long_prompt_tokens need each other", "long_prompt_tokens"
        )
    if scheduler.prompt_share is not None:
        left = scheduler.max_batch_tokens - int(scheduler.prompt_share * scheduler.max_batch_tokens)
        if left < scheduler.num_slots or left == scheduler.max_batch_tokens:
            yield _error(
                "prompt_share",
                f"{scheduler.prompt_share} of {scheduler.max_batch_tokens} tokens leaves {left} for decodes;"
                f" it must leave at least scheduler.num_slots ({scheduler.num_slots}), and some for prompts",
                "max_batch_tokens",
                "num_slots",
            )
    for tenant, weight in (scheduler.tenant_weights or {}).items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (isinstance(tenant, str) and number and 0 < weight < math.inf):
            yield _error(
                "tenant_weights",
                f"{in_words(tenant)}: {in_words(weight)} is no weight; give a number above 0",
            )


def _unread(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Keys that another key makes meaningless, or needs."""
    for leaf, (other, values, required) in _READ_WHERE.items():
        said, chosen = getattr(scheduler, leaf), getattr(scheduler, other)
        where = f"where scheduler.{other} is {' or '.join(in_words(each).strip(chr(39)) for each in values)}"
        if chosen in values and said is None and required:
            yield _error(leaf, f"required {where}", other)
        if chosen not in values and said not in (None, False):
            yield _error(
                leaf, f"read only {where}, and it is {in_words(chosen).strip(chr(39))}; leave it out", other
            )


def _too_much(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Numbers that are larger than what they are a part of."""
    for leaf, other, why in (
        ("num_slots", "max_batch_tokens", "not every slot could decode in every step"),
        ("batch_size", "num_slots", "not every request of a batch would find a slot"),
        ("chunk_tokens", "max_batch_tokens", "no step could hold a chunk"),
        ("max_chunk_tokens", "max_batch_tokens", "no step could hold a chunk"),
        ("min_chunk_tokens", "max_chunk_tokens", "chunks would grow where they are to shrink"),
    ):
        part, whole = getattr(scheduler, leaf), getattr(scheduler, other)
        if part is not None and whole is not None and part > whole:
            yield _error(
                leaf,
                f"{part} is more than scheduler.{other} ({whole}), so that {why};"
                " lower the first or raise the second",
                other,
            )


def _uncut(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """What cannot be asked of a policy that does not cut prompts to measure."""
    policy = scheduler.policy
    if policy in (*WHOLE, "static") and (scheduler.chunk != "fixed" or scheduler.chunk_tokens is not None):
        leaf = "chunk" if scheduler.chunk != "fixed" else "chunk_tokens"
        yield _error(
            leaf, f"scheduler.policy is {policy}, which takes no length of chunks; leave it out", "policy"
        )
    longest = scheduler.max_request_tokens
    if policy in WHOLE and longest is not None and longest > scheduler.max_batch_tokens:
        yield _error(
            "max_request_tokens",
            f"{longest} is more than scheduler.max_batch_tokens ({scheduler.max_batch_tokens}), and"
            f" scheduler.policy is {policy}, which computes a prompt in one step; lower the first or raise"
            " the second",
            "max_batch_tokens",
            "policy",
        )


def _error(leaf: str, text: str, *others: str) -> RecipeError:
    return RecipeError(f"scheduler.{leaf}: {text}", *(f"scheduler.{each}" for each in (leaf, *others)))
