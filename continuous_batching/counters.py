"""What has happened since the start? Sums, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Each only grows; a rate is a difference of two readings."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    late_masks: int = 0  # rows that got no token in a step, for it was not known which may come
    prompt_tokens: int = 0  # of requests admitted for the first time
    hit_tokens: int = 0  # of these, found in the prefix cache
    host_hit_tokens: int = 0  # of these, in pages that rested in the host pool
    preemptions: int = 0
    lost_tokens: int = 0  # computed, then lost to preemption
    refound_tokens: int = 0  # of these, found in the prefix cache when the request came back
    evicted_pages: int = 0
    rested_pages: int = 0  # of these, copied to the host pool
    promoted_pages: int = 0  # copied back from there, for requests that found them
    saved_pages: int = 0  # that the tier below was asked to keep
    fetched_pages: int = 0  # from there, in the host pool
    copied_pages: int = 0  # on write, by a row that forked
    compacted_pages: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    refused_swaps: int = 0  # the host pool had no room: the request is recomputed
    broken_swaps: int = 0  # the shared pages before the swapped ones are gone: it is recomputed
    drafts: int = 0  # spans that had some
    draft_tokens: int = 0
    sent_pages: int = 0  # to other engines
    arrived_pages: int = 0  # from other engines, whole
    missed_pages: int = 0  # that were to come from there, and did not: they are computed here
    accepted_tokens: int = 0  # drafts that the model said too
