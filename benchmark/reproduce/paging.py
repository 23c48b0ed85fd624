"""Reproduce the experiments on the costs and savings of pages."""

from __future__ import annotations

from benchmark.reproduce.batching import ratio
from benchmark.reproduce.case import Case, Offered, chunked
from benchmark.reproduce.case_runs import Results
from benchmark.reproduce.experiment import (
    HITS,
    ITL_99,
    ITL_MAX,
    PAGES,
    PREEMPTIONS,
    REQUESTS,
    TPOT,
    TTFT,
    TTFT_99,
    Chart,
    Column,
    Experiment,
    figure,
)

COPIED = Column("copied_pages", "pages moved", 0)
SIZES = (16, 128)
SHARED = (7, 100, 512)
POOL_TOKENS = 12_288  # scarce for 64 slots
CLAIMED_COPY_MS, CLAIMED_PAGES = 10.0, 32_768


def prefix() -> Experiment:
    """Return the experiment on a prefix that all prompts share."""
    cases = [
        Case(
            f"{shared} tokens, pages of {size}, {'shared' if is_shared else 'each its own'}",
            Offered(300, rate_per_s=10, prompt_tokens=128, most_prompt_tokens=512, shared_tokens=shared),
            (*chunked(1024), f"cache.page_size={size}", f"cache.prefix_sharing={str(is_shared).lower()}"),
        )
        for shared in SHARED
        for size in SIZES
        for is_shared in ((False, True) if size == SIZES[0] else (True,))
    ]
    return Experiment(
        "prefix",
        "A shared beginning of prompts",
        "two requests with a beginning of 7 tokens share its 2 pages of 16 (CANN article).",
        tuple(cases),
        (REQUESTS, HITS, TTFT, TTFT_99, TPOT, PAGES),
        Chart((HITS, TTFT, PAGES)),
        _prefix,
        ("pages of a prefix",),
    )


def _prefix(results: Results) -> list[str]:
    def shares(shared: int, size: int, *, is_shared: bool = True) -> dict[str, object]:
        return results[f"{shared} tokens, pages of {size}, {'shared' if is_shared else 'each its own'}"]

    long, apart = shares(512, 16), shares(512, 16, is_shared=False)
    return [
        f"7 tokens share nothing ({figure(shares(7, 16), 'prefix_hit_rate'):.3f} of the prompts' tokens):"
        " they fill no page of 16, and they would be one page, not 2.",
        f"512 tokens save {figure(long, 'prefix_hit_rate'):.0%} of the prompts' tokens and bring the median"
        f" TTFT from {figure(apart, 'ttft_ms.p50'):.0f} to {figure(long, 'ttft_ms.p50'):.0f} ms; the TPOT is"
        f" {ratio(long, apart, 'tpot_ms.mean'):.2f} times what it was, because fewer steps compute prompts.",
        f"Pages of 128 find less: of 100 shared tokens {figure(shares(100, 128), 'prefix_hit_rate'):.3f},"
        f" where pages of 16 find {figure(shares(100, 16), 'prefix_hit_rate'):.3f}.",
    ]


def page_sizes() -> Experiment:
    """Return the experiment on small and large pages in a small pool."""
    load = Offered(300)
    cases = [
        Case(
            f"pages of {size}",
            load,
            (
                *chunked(1024),
                f"cache.page_size={size}",
                f"cache.num_pages={POOL_TOKENS // size + 1}",
                "cache.memory_fraction=null",
                "cache.prefix_sharing=false",
            ),
        ).at(load.rate_per_s)
        for size in (16, 32, 64, 128)
    ]
    return Experiment(
        "page_sizes",
        f"Sizes of pages, in a pool of {POOL_TOKENS:,} tokens",
        "a request of 2,048 tokens takes 128 pages of 16 that need not lie together, so memory is hardly"
        " wasted (CANN article; the fused operators of Ascend want pages of 128).",
        tuple(cases),
        (REQUESTS, PAGES, PREEMPTIONS, TTFT, TPOT, ITL_MAX),
        Chart((REQUESTS, PREEMPTIONS)),
        _page_sizes,
        ("pages of a request", "pages in use"),
    )


def _page_sizes(results: Results) -> list[str]:
    small, large = (results[f"pages of {size}, all at once"] for size in SIZES)
    mean = (figure(large, "prompt_tokens") + figure(large, "output_tokens")) / figure(large, "completed")
    return [
        f"Pages of 128 serve {ratio(large, small, 'requests_per_s'):.3f} times what pages of 16 do, with"
        f" {figure(large, 'preemptions'):.0f} preemptions against {figure(small, 'preemptions'):.0f}. Half a"
        f" page of each request stands empty: {64 / mean:.0%} and {8 / mean:.0%} of a request of {mean:.0f}"
        " tokens at its end.",
        "The roofline reads keys at one rate, and so does not show what an operator gains by larger pages.",
    ]


def compaction() -> Experiment:
    """Return the experiment on moving all held pages to the low end."""
    load = Offered(400, rate_per_s=12)
    cases = [
        Case(
            "never" if not steps else f"every {steps:,} steps",
            load,
            (*chunked(1024), f"cache.compact_every_steps={steps}"),
        )
        for steps in (0, 1000, 100, 10)
    ]
    return Experiment(
        "compaction",
        "The cost of compaction",
        "32,768 pages are 8.5 GB, moved in about 10 ms every 1,000 steps: 0.001 % (CANN article).",
        tuple(cases),
        (REQUESTS, COPIED, TPOT, ITL_99, ITL_MAX),
        Chart((COPIED, TPOT, ITL_MAX)),
        _compaction,
        ("bytes that compaction moves", "share of compaction", "time of compaction"),
    )


def _compaction(results: Results) -> list[str]:
    never, rarely, often = (results[name] for name in ("never", "every 1,000 steps", "every 10 steps"))
    page_bytes = 16 * figure(never, "kv_bytes_per_token")
    all_ms = 2 * CLAIMED_PAGES * page_bytes / (figure(never, "num_devices") * 1200e9) * 1e3
    return [
        f"32,768 pages of 16 tokens are {CLAIMED_PAGES * page_bytes / 1e9:.0f} GB over all 32 layers, more"
        f" than the cache of this machine holds; to read and write them takes {all_ms:.0f} ms on 8 devices at"
        " the whole bandwidth.",
        "Here only pages that lie above a gap move, and few do, because the pages that were freed last are"
        f" handed out first. Every 1,000 steps they cost {ratio(rarely, never, 'tpot_ms.mean') - 1:+.2%} of"
        f" TPOT, every 10 steps {ratio(often, never, 'tpot_ms.mean') - 1:+.2%}.",
        "Pages need not lie together, and nothing runs out of memory for holes. Compaction serves to shrink"
        " or export a dense cache, and is off by default.",
    ]


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [prefix(), page_sizes(), compaction()]
