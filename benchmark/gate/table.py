"""Declare the figures of a result: unit, names, and what each is checked against.

The gate's checks, the names of `vllm bench` and the signs of figures are derived from this table alone. A
figure has ties to other sources in the file, or is read by the named laws; a figure with neither says why.
What is stated once and is no measurement is a fact: `benchmark.gate.facts`.
"""

from __future__ import annotations

from benchmark.gate import elsewhere as other
from benchmark.gate.law import Law
from benchmark.gate.tie import Figure, Tie, laws_of

READINGS, COUNTERS, RECORDS = "readings", "counters", "of the records"
SETTINGS, CACHE, SERVER = "settings", "cache", "server"
STATEMENTS = {  # a source -> its law's statement, and the field without which there is no such source
    READINGS: ("figures are the sums of the last reading, and fit the others", "metrics"),
    COUNTERS: ("figures are what the engine's counters grew by in the run", "counters"),
    RECORDS: ("what is summed over requests is the sum of their records", "records"),
    SETTINGS: ("what was set in the recipe is what ran", "settings"),
    CACHE: ("pools add up, and moved what the engine's counters say", "cache_after_all_runs"),
    SERVER: ("figures are what the server's own counters grew by", "metrics"),
}
RATE = 6e-5  # tolerance of a share given with four decimals
TOLERANCE_MS = 1.0  # how far a server's clock may begin from the client's
LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
PARTS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
LATENCY_LAWS = ("recount", "percentiles", "means", "signs")


def _latency(name: str) -> tuple[Figure, ...]:
    theirs = LATENCIES[name]
    ties = {
        ("ttft_ms", "mean"): Tie(
            SERVER,
            "the server's own mean time to the first token",
            other.ours_at_server(other.server_ratio("ttft_s", "ttft_count", 1e3)),
            "at least",
            relative=0.01,
            absolute=TOLERANCE_MS,
        ),
        ("e2e_ms", "mean"): Tie(
            SERVER,
            "the server's own mean time of a request",
            other.ours_at_server(other.server_ratio("e2e_s", "e2e_count", 1e3)),
            "at least",
            relative=0.01,
            absolute=TOLERANCE_MS,
        ),
    }
    return tuple(
        Figure(
            f"{name}.{part}",
            "ms",
            tuple(f"{each}_{theirs}_ms" for each in ((PARTS[part], "p50") if part == "p50" else (word,))),
            ties=(ties[name, part],) if (name, part) in ties else (),
            laws=LATENCY_LAWS,
        )
        for part, word in (*PARTS.items(), ("min", "min"), ("max", "max"))
    )


COUNTED = (
    Figure("requests", "count", ("num_prompts", "num_requests"), laws=("every request", "all counted")),
    Figure(
        "completed",
        "count",
        ties=(
            Tie(READINGS, "the requests that ended", other.last("ended")),
            Tie(SERVER, "the requests that it answered", other.server_growth("requests"), "at most"),
        ),
        laws=("every request", "all counted", "whole batches"),
    ),
    Figure("failed", "count", laws=("all counted", "errors")),
    Figure("unfinished", "count", laws=("all counted",)),
    Figure("rejected", "count", laws=("errors",)),
    Figure("retried", "count", alone="records hold the last attempt of a request, not how many there were"),
    Figure(
        "prompt_tokens",
        "count",
        ("total_input_tokens",),
        ties=(
            Tie(READINGS, "the tokens of prompts", other.last("prompt_tokens")),
            Tie(COUNTERS, "prompt_tokens", other.growth("prompt_tokens")),
            Tie(SERVER, "its prompt_tokens", other.ours_at_server(other.server_growth("prompt_tokens"))),
        ),
        laws=("tokens by request", "whole batches"),
    ),
    Figure(
        "output_tokens",
        "count",
        ("total_output_tokens",),
        ties=(
            Tie(READINGS, "the sampled tokens", other.last("sampled")),
            Tie(COUNTERS, "sampled_tokens", other.growth("sampled_tokens")),
            Tie(SERVER, "its output_tokens", other.ours_at_server(other.server_growth("output_tokens"))),
        ),
        laws=("tokens by request", "whole batches"),
    ),
    Figure("asked_output_tokens", "count", ties=(Tie(RECORDS, "the sum of max_tokens", other.asked_tokens),)),
    Figure("ended_by.stop", "count", ties=(Tie(RECORDS, "those that ended so", other.ended_by("stop")),)),
    Figure("ended_by.length", "count", ties=(Tie(RECORDS, "those that ended so", other.ended_by("length")),)),
    Figure(
        "least_output_tokens",
        "count",
        ties=(Tie(RECORDS, "the shortest answer", other.extreme_answer(min)),),
    ),
    Figure(
        "most_output_tokens",
        "count",
        ties=(Tie(RECORDS, "the longest answer", other.extreme_answer(max)),),
    ),
    Figure("itl_gaps", "count", laws=("recount",)),
    Figure("total_num_tokens", "count", laws=("all tokens",)),
    Figure(
        "max_concurrent_requests",
        "count",
        ties=(
            Tie(RECORDS, "the most at once", other.together(ends_first=True), "at least"),
            Tie(RECORDS, "the most at once", other.together(ends_first=False), "at most"),
        ),
    ),
)
TIMES = (
    Figure("duration_s", "s", ("duration", "elapsed_time"), laws=("recount", "clocks", "recount, batches")),
    Figure(
        "requests_per_s", "per s", ("request_throughput", "requests_per_second"), laws=("rate x duration",)
    ),
    Figure("output_tokens_per_s", "per s", ("output_throughput",), laws=("rate x duration", "runs")),
    Figure(
        "total_tokens_per_s",
        "per s",
        ("total_token_throughput", "tokens_per_second"),
        laws=("rate x duration",),
    ),
    Figure("offered_per_s", "per s", laws=("offered, records", "served <= offered", "sent when due")),
    Figure("request_goodput", "per s", laws=("goodput",)),
    Figure("good_share", "share", laws=("goodput",)),
    Figure("fluidity", "share", laws=("fluidity",)),
    *(row for name in LATENCIES for row in _latency(name)),
)
LOAD = (
    Figure(
        "steps",
        "count",
        ties=(
            Tie(READINGS, "the number of the last step", other.last("steps")),
            Tie(READINGS, "the number of readings", other.num_readings, "at least"),
            Tie(READINGS, "the number of readings of so few steps", other.steps_of_few),
            Tie(COUNTERS, "steps", other.growth("steps")),
        ),
        laws=("spans",),
    ),
    Figure(
        "mean_batch",
        "mean",
        ties=(
            Tie(READINGS, "spans / steps", other.per("spans", "steps"), absolute=0.006),
            Tie(
                READINGS,
                "the mean number running at steps",
                other.mean_running_at_steps,
                "at most",
                absolute=0.01,
            ),
        ),
        laws=("spans", "slots"),
    ),
    Figure(
        "mean_page_use",
        "share",
        ties=(
            Tie(READINGS, "pages held / pages, over all steps", other.page_use, absolute=RATE),
            Tie(READINGS, "the mean kv_usage of all steps", other.mean_usage_at_steps, absolute=1e-4),
        ),
    ),
    Figure(
        "prefix_hit_rate",
        "share",
        ties=(
            Tie(
                READINGS, "hits / tokens of prompts", other.per("hit_tokens", "prompt_tokens"), absolute=RATE
            ),
            Tie(COUNTERS, "hit_tokens / prompt_tokens", other.hit_share, absolute=RATE),
            Tie(CACHE, "hit_rate over all runs", other.most_hits, "at most", absolute=1e-3),
            Tie(RECORDS, "cached_tokens / prompt_tokens", other.cached_share, absolute=RATE),
        ),
    ),
    Figure(
        "preemptions",
        "count",
        ties=(
            Tie(READINGS, "preemptions", other.last("preemptions")),
            Tie(COUNTERS, "preemptions", other.growth("preemptions")),
        ),
    ),
    Figure(
        "mean_running",
        "mean",
        ties=(
            Tie(READINGS, "requests x seconds / duration", other.over_time, relative=1e-3, absolute=1e-4),
            Tie(
                RECORDS, "those between first and last token", other.decoding, "at least", 1e-3, absolute=1e-3
            ),
        ),
        laws=("Little, running", "slots"),
    ),
    Figure(
        "mean_in_system",
        "mean",
        ties=(Tie(RECORDS, "the sum of W / duration", other.in_system, relative=1e-3, absolute=1e-3),),
        laws=("Little", "Little, records"),
    ),
    Figure("mean_in_flight", "mean", laws=("in flight",)),
)
MACHINE = (
    Figure(
        "slots",
        "count",
        ties=(Tie(SETTINGS, "scheduler.num_slots", other.figure("settings.scheduler.num_slots")),),
        laws=("at once", "slots"),
    ),
    Figure(
        "page_size",
        "count",
        ties=(Tie(SETTINGS, "cache.page_size", other.figure("settings.cache.page_size")),),
    ),
    Figure(
        "num_pages",
        "count",
        ties=(Tie(SETTINGS, "cache.num_pages less one", other.figure("settings.cache.num_pages", -1)),),
    ),
    Figure(
        "num_devices", "count", ties=(Tie(SETTINGS, "the devices used", other.figure("computed_on.count")),)
    ),
    Figure(
        "page_bytes",
        "bytes",
        ties=(Tie(SETTINGS, "page_size x kv_bytes_per_token", other.grown_page, "at least"),),
    ),
)
POOLS = (
    *(
        Figure(
            f"cache_after_all_runs.{name}",
            "count",
            ties=(Tie(CACHE, "that of an engine at rest", other.zero),),
        )
        for name in ("running_requests", "waiting_requests", "queued_tokens", "held_pages")
    ),
    Figure(
        "cache_after_all_runs.free_pages",
        "count",
        ties=(Tie(CACHE, "what is neither held nor cached", other.free_pages),),
    ),
    Figure("cache_after_all_runs.idle_pages", "count", laws=(CACHE,)),
    *(
        Figure(
            f"cache_after_all_runs.{rate}",
            "share",
            ties=(Tie(CACHE, part, other.hit_share_in("counters_after_all_runs", part), absolute=RATE),),
        )
        for rate, part in (("hit_rate", "hit_tokens"), ("host_hit_rate", "host_hit_tokens"))
    ),
    *(
        Figure(
            f"cache_after_all_runs.{name}_bytes", "bytes", ties=(Tie(CACHE, counter, other.moved(counter)),)
        )
        for name, counter in (
            ("copied_on_write", "copied_pages"),
            ("compacted", "compacted_pages"),
            ("swapped_out", "swapped_out_pages"),
            ("swapped_in", "swapped_in_pages"),
            ("rested", "rested_pages"),
            ("promoted", "promoted_pages"),
        )
    ),
)
CLIENT = (
    *(
        Figure(
            f"client.{name}_ms.{part}",
            "ms",
            ties=(
                Tie(
                    RECORDS, f"that of {name}_ms", other.part_of_column(f"{name}_ms", percent), absolute=0.002
                ),
            ),
            laws=("client on time",),
        )
        for name in ("late", "held")
        for part, percent in (("p50", 50), ("p99", 99), ("max", 100))
    ),
    *(
        Figure(
            f"metrics.mean_{name}",
            "mean",
            ties=(Tie(READINGS, "their mean", other.mean_reading(name), absolute=1e-4),),
        )
        for name in ("running", "waiting", "kv_usage")
    ),
    *(
        Figure(
            f"metrics.mean_{name}_ms",
            "ms",
            ties=(
                Tie(
                    SERVER,
                    "seconds / requests",
                    other.server_ratio(f"{name}_s", f"{name}_count", 1e3),
                    absolute=0.002,
                ),
            ),
        )
        for name in ("queue", "prefill")
    ),
    Figure(
        "metrics.prefix_hit_rate",
        "share",
        ties=(
            Tie(SERVER, "hits / queries", other.server_ratio("prefix_hits", "prefix_queries"), absolute=RATE),
        ),
    ),
    Figure(
        "metrics.preemptions",
        "count",
        ties=(Tie(SERVER, "its preemptions", other.server_growth("preemptions")),),
    ),
)
FIGURES: tuple[Figure, ...] = (*COUNTED, *TIMES, *LOAD, *MACHINE, *POOLS, *CLIENT)
LAWS: tuple[Law, ...] = laws_of(FIGURES, STATEMENTS)
