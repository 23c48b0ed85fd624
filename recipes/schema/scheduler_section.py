"""Define a recipe's keys for scheduling, and the conditions under which each is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from recipes.schema.keys import key

_DAY_MS, _MOST_TOKENS = 86_400_000, 2**20
WHOLE = ("orca", "prefill_first")  # policies that compute a prompt in one step
LEAST_SHARE, MOST_SHARE = 0.001, 0.999  # the share of a split step that is for prompts
CHUNKED = ("stall_free", "split")  # policies that cut prompts into chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """How requests are queued, batched and preempted."""

    policy: Literal["stall_free", "split", "prefill_first", "orca", "static"] = key(
        "stall_free: decodes first, then prompts in chunks; split: the same with separate budgets for"
        " decodes and prompts; prefill_first: whole prompts, while decodes wait; orca: whole prompts beside"
        " the decodes; static: one batch after the other",
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
        "the longest request, prompt and answer together; null: what the model, the cache and a step of whole"
        " prompts allow",
        default=None,
        least=2,
        most=2**24,
    )
    chunk: Literal["fixed", "dynamic", "adaptive"] = key(
        "stall_free, split: how long the chunks of a prompt are; dynamic: they get shorter towards its end;"
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
        "the length of chunks (dynamic) or of steps (adaptive) is a multiple of it; null: 32",
        default=None,
        least=1,
        most=4096,
    )
    chunk_stages: int | None = key(
        "dynamic: the number of chunk lengths from first to last; null: 4", default=None, least=1, most=1024
    )
    staged_tokens: int | None = key(
        "dynamic: the tokens of a prompt over which the stages are spread evenly; null: the first chunk times"
        " the number of stages",
        default=None,
        least=1,
        most=2**24,
    )
    target_itl_ms: float | None = key(
        "adaptive: the target for the time between two tokens of a request, which 99 in 100 are to meet;"
        " null: 50",
        default=None,
        least=0.1,
        most=_DAY_MS,
    )
    prompt_share: float | None = key(
        "split: the share of `scheduler.max_batch_tokens` for prompts; null: what one decode for each slot"
        " leaves",
        default=None,
        least=LEAST_SHARE,
        most=MOST_SHARE,
    )
    max_long_prefills: int | None = key(
        "stall_free, split: the most long prompts that are computed at once, while short ones overtake them;"
        " null: prompts are computed in order of arrival",
        default=None,
        least=1,
        most=2**16,
    )
    long_prompt_tokens: int | None = key(
        "a prompt with more tokens counts as long for `scheduler.max_long_prefills`",
        default=None,
        least=1,
        most=2**24,
    )
    queue: Literal["fcfs", "sjf", "priority", "deadline"] = key(
        "which request is admitted next; fcfs: the one that arrived first; sjf: the one with the shortest"
        " prompt and longest answer together; priority: by waiting time, `priority` and length together;"
        " deadline: the one whose timeout ends first",
        default="fcfs",
    )
    priority_s: float | None = key(
        "priority: how many seconds of waiting one level of `priority` is worth; null: 10",
        default=None,
        least=0,
        most=86_400,
    )
    length_s: float | None = key(
        "priority: how many seconds of waiting 1,000 tokens cost; null: 1",
        default=None,
        least=0,
        most=86_400,
    )
    deadline_s: float | None = key(
        "deadline: the timeout by which a request without `timeout_s` is ordered",
        default=None,
        least=0.001,
        most=86_400,
    )
    outrank: bool = key(
        "priority: the next request preempts running ones of lower `priority` where slots or pages run short",
        default=False,
    )
    fair_tenants: bool = key(
        "tenants take turns by the tokens that they were served; `scheduler.queue` orders the requests of one"
        " tenant",
        default=False,
    )
    tenant_weights: dict[str, Any] | None = key(
        "fair_tenants: the weights of tenants by name; 1 for those that are not named",
        default=None,
    )
    max_waiting_requests: int | None = key(
        "the most requests in the queue; further ones are refused; null: no limit",
        default=None,
        least=1,
        most=2**31 - 1,
    )
    max_waiting_tokens: int | None = key(
        "the most prompt tokens in the queue; further requests are refused; null: no limit",
        default=None,
        least=1,
        most=2**40,
    )
    max_queue_wait_s: float | None = key(
        "a request that was not admitted this long after its arrival is ended; null: no limit",
        default=None,
        least=0.001,
        most=86_400,
    )
    victim: Literal["youngest", "fewest_lost", "lowest_priority"] = key(
        "which request is preempted when pages run short: the youngest, the one that loses the fewest"
        " computed tokens, or the one of the lowest `priority`; never the oldest",
        default="youngest",
    )
    batch_size: int | None = key(
        "static: requests that start together; null: `scheduler.num_slots`", default=None, least=1, most=2**16
    )
    max_wait_ms: float | None = key(
        "static: how long the first request of a batch waits for others; null: 100",
        default=None,
        least=0,
        most=_DAY_MS,
    )
    overlap: bool = key(
        "schedule the next step while the device computes this one, wherever possible; answers stay the same",
        default=False,
    )
    record: Path | None = key(
        "a new file that records the scheduler's inputs and decisions for `scripts.replay`; it holds"
        " prompts as token ids",
        default=None,
    )
    seed: int = key(
        "seed from which the seeds of requests without one are drawn", default=0, least=0, most=2**63 - 1
    )


# These keys are read only where each of the other keys has one of the given values.
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
UNSAID = {each.name: each.default for each in fields(SchedulerSection)}  # the value of a key that nobody set
