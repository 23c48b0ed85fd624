"""Count what the engine has done since its start, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from kv_cache.groups import PageCounts


@dataclass(slots=True)
class Counters(PageCounts):
    """Totals that only grow; a rate is the difference of two readings. Those of pages are of group 0."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    late_masks: int = 0  # rows that got no token in a step because their mask was not ready
    prompt_tokens: int = 0  # prompt tokens of requests admitted for the first time
    hit_tokens: int = 0  # prompt tokens found in the prefix cache
    host_hit_tokens: int = 0  # hit tokens in pages that rested in the host pool
    preemptions: int = 0
    lost_tokens: int = 0  # tokens computed, then lost to preemption
    refound_tokens: int = 0  # lost tokens found in the prefix cache when their request resumed
    saved_pages: int = 0  # pages that the tier below was asked to keep
    fetched_pages: int = 0  # pages read from the tier below into the host pool
    refused_swaps: int = 0  # swaps for which the host pool had no room; the request is recomputed
    # Swaps whose shared pages before the swapped ones are gone; the request is recomputed
    broken_swaps: int = 0
    drafts: int = 0  # spans that held drafts
    draft_tokens: int = 0
    sent_pages: int = 0  # pages sent to other engines
    arrived_pages: int = 0  # pages that arrived whole from other engines
    missed_pages: int = 0  # pages expected from other engines that did not arrive; they are computed here
    accepted_tokens: int = 0  # drafts that the model accepted
