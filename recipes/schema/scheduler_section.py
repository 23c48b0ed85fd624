"""Which keys has a recipe for who runs when, and where is each of them read?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from recipes.schema.keys import key

_DAY_MS, _MOST_TOKENS = 86_400_000, 2**20
WHOLE = ("orca", "prefill_first")  # policies that compute a prompt in one step
CHUNKED = ("stall_free", "split")  # policies that cut prompts into chunks


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
    max_batch_tokens: int | None = key(
        "the most tokens computed in one step; null: orca, prefill_first: the longest request",
        default=None,
        least=1,
        most=_MOST_TOKENS,
    )
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
        "dynamic: the last chunk; null: an eighth of the first; adaptive: the tokens of prompts in a step"
        " that misses the target; null: `scheduler.tile_tokens`",
        default=None,
        least=1,
        most=_MOST_TOKENS,
    )
    max_chunk_tokens: int | None = key(
        "dynamic: the first chunk; adaptive: the most tokens of prompts in a step; null:"
        " `scheduler.max_batch_tokens`",
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
        "dynamic: chunk lengths from first to last; null: 4", default=None, least=1, most=1024
    )
    staged_tokens: int | None = key(
        "dynamic: the tokens of a prompt over which the stages go, in equal parts; null: a first chunk for"
        " each",
        default=None,
        least=1,
        most=2**24,
    )
    target_itl_ms: float | None = key(
        "adaptive: 99 in 100 times between two tokens of a request shall be no longer; null: 50",
        default=None,
        least=0.1,
        most=_DAY_MS,
    )
    prompt_share: float | None = key(
        "split: the part of `scheduler.max_batch_tokens` that is for prompts; null: what a decode of each"
        " slot leaves",
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
    batch_size: int | None = key(
        "static: requests that start together; null: `scheduler.num_slots`", default=None, least=1, most=2**16
    )
    max_wait_ms: float | None = key(
        "static: how long the first of a batch waits for the others; null: 100",
        default=None,
        least=0,
        most=_DAY_MS,
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


# Keys that are read only where each of these other keys has one of these values
READ_WHERE: dict[str, dict[str, tuple[object, ...]]] = {
    "batch_size": {"policy": ("static",)},
    "max_wait_ms": {"policy": ("static",)},
    "overlap": {"policy": ("stall_free", "split", "prefill_first", "orca")},
    "prompt_share": {"policy": ("split",)},
    "max_long_prefills": {"policy": CHUNKED},
    "chunk": {"policy": CHUNKED},
    "chunk_tokens": {"policy": CHUNKED, "chunk": ("fixed",)},
    "min_chunk_tokens": {"chunk": ("dynamic", "adaptive")},
    "max_chunk_tokens": {"chunk": ("dynamic", "adaptive")},
    "tile_tokens": {"chunk": ("dynamic", "adaptive")},
    "chunk_stages": {"chunk": ("dynamic",)},
    "staged_tokens": {"chunk": ("dynamic",)},
    "target_itl_ms": {"chunk": ("adaptive",)},
    "priority_s": {"queue": ("priority",)},
    "length_s": {"queue": ("priority",)},
    "outrank": {"queue": ("priority",)},
    "deadline_s": {"queue": ("deadline",)},
    "tenant_weights": {"fair_tenants": (True,)},
}
UNSAID = {each.name: each.default for each in fields(SchedulerSection)}  # what a key is that nobody set
