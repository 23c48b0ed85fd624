"""Check that a result has all fields that the verb which made it writes.

A field that is dropped takes the laws that read it along, so absence is checked by itself: some fields are
written together, or not at all. A file of another tool has none of the fields that are looked for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmark.gate.law import Figures, Law, NotCheckable, first
from benchmark.gate.records import DONE

# Every engine in a benchmark's process writes these fields.
ENGINE = (
    *("recipe", "overrides", "machine", "clock", "computed_on", "num_devices", "weight_bytes_per_step"),
    *("kv_bytes_per_token", "page_size", "page_bytes", "settings", "warm_up_runs", "warm_up_counted"),
    *("max_tokens_per_step", "requests", "completed", "failed", "duration_s", "prompt_tokens"),
    *("output_tokens", "output_tokens_per_s", "facts"),
    *(f"computed_on.{name}" for name in ("kind", "count", "virtual", "attention", "memory_gib")),
    *("machine.device", "machine.torch"),
)
NAMED = ("device_profile",)  # engines write it too, as null where there is no profile
RUN = (  # fields of a run over a trace, or over requests that all come at once
    *("trace", "runs_output_tokens_per_s", "runs_output_tokens", "runs_duration_s", "cache_after_all_runs"),
    *("counters_after_all_runs", "metrics", "metrics.columns", "metrics.readings", "peak_rss_gib"),
    *("requests_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "itl_gaps", "e2e_ms"),
    *("mean_batch",),
    *("mean_page_use", "steps", "prefix_hit_rate", "preemptions", "slots", "num_pages", "counters"),
    *("counters.before", "counters.after"),
    *(
        f"cache_after_all_runs.{name}"
        for name in (
            *("running_requests", "waiting_requests", "queued_tokens", "held_pages", "idle_pages"),
            *("free_pages", "lookups"),
            *("fragmentation", "swapped_host_pages", "resting_host_pages", "free_host_pages", "hit_rate"),
            *("host_hit_rate", "copied_on_write_bytes", "compacted_bytes", "swapped_out_bytes"),
            *("swapped_in_bytes", "rested_bytes", "promoted_bytes"),
        )
    ),
)
NAMED_IN_RUN = ("offered_per_s", "least_output_tokens", "most_output_tokens")
BATCHES = (
    *("batch_size", "input_len", "output_len", "avg_latency", "latencies", "percentiles", "tpot_ms"),
    *("batches", "batches.columns", "batches.readings"),
    *(f"percentiles.{part}" for part in (10, 25, 50, 75, 90, 99)),
)
THEIRS = ("elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second")
# Verbs that write their own name.
VERBS = ("serve", "host", "device", "kv", "simulation", "stall", "speculation")
# Fields that are present where each request has one answer.
ASKED = ("ended_by", "asked_output_tokens", "records")
COUNTERS = (
    ("counters.before", "counters.after", "counters_after_all_runs"),  # an engine's counters
    ("metrics.before", "metrics.after"),  # a server's counters
)
COLUMNS = (
    *("at_s", "running", "waiting", "kv_usage", "held_pages", "wall_s", "cpu_s", "steps", "spans", "tokens"),
    *("sampled", "ended", "page_steps", "running_s", "prompt_tokens", "hit_tokens", "preemptions"),
)
MEANS = ("mean_running", "mean_in_system")  # fields that are present where each request also ended in a step
SERVED = (
    *(
        "benchmark",
        "backend",
        "trace",
        "trace_sha256",
        "num_prompts",
        "extra_body",
        "retry_rejected",
        "date",
        "base_url",
    ),
    *("model_id", "loop", "machine", "clock", "server_said", "duration", "completed", "failed", "rejected"),
    *("retried", "ended_by", "errors", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("output_throughput", "total_token_throughput", "mean_in_flight", "max_concurrent_requests"),
    *("client", "warm_up_counted", "records", "facts"),
    *(f"client.{name}_ms.{part}" for name in ("late", "lag", "held") for part in ("p50", "p99", "max")),
    *("client.cpu_share", "client.tokens_counted_by_pieces"),
)
NAMED_IN_SERVED = (
    *("endpoint", "request_rate", "max_concurrency", "seed", "goodput", "server", "metrics"),
    *("warm_up_runs", "offered_per_s", "asked_output_tokens"),
)
CLOCK = tuple(f"clock.{name}" for name in ("started_at", "ended_at", "monotonic_s", "cpu_s"))
MACHINE = tuple(f"machine.{name}" for name in ("cpu", "cores", "python", "numpy", "preloaded"))
# Fields of some records only: pieces of one token each need no count.
OF_SOME = ("piece_tokens", "cached_tokens")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
# (what it is, fields that identify it, fields that it has, fields that it has but may be null).
Shape = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
SHAPES: tuple[Shape, ...] = (
    ("an engine's result", ("computed_on", "settings", "weight_bytes_per_step"), ENGINE, NAMED),
    (
        "a run's result",
        ("counters", "cache_after_all_runs", "counters_after_all_runs", "peak_rss_gib"),
        RUN,
        NAMED_IN_RUN,
    ),
    ("a result of batches", ("batches", "batch_size", "avg_latency"), BATCHES, ()),
    ("a result of throughput", THEIRS, (*THEIRS, *RUN), ()),
    ("a client's result", ("server_said", "trace_sha256", "client"), SERVED, NAMED_IN_SERVED),
    ("a result with a clock", ("clock", "facts"), CLOCK, ()),
)


def ours(figures: Figures) -> bool:
    """Return whether a verb that measures wrote it; its results have digests and clocks."""
    return figures.raw("SIMULATED") is None and any(
        figures.raw(name) is not None for name in ("clock", "computed_on", "server_said")
    )


def _lacks(what: str, figures: Figures, names: Iterable[str], empty: Iterable[str] = ()) -> list[str | None]:
    # Only the file's own names count: other names of a figure are other fields.
    stated = Figures(figures.stated)
    absent = [name for name in names if stated.raw(name) is None]
    absent += [name for name in empty if name not in figures.stated]
    return [f"{what} has {name}, and it is absent" for name in absent]


def whole(figures: Figures) -> str | None:
    """Check that fields which are written together are all there."""
    if not ours(figures):
        raise NotCheckable("no verb that measures has written it")
    wrongs: list[str | None] = []
    if (verb := figures.raw("benchmark")) is not None and verb not in VERBS:
        wrongs.append(f"benchmark is {verb!r}; it must be one of {', '.join(VERBS)}")
    for what, signs, names, empty in SHAPES:
        if any(figures.stated.get(name) is not None for name in signs):
            wrongs += _lacks(what, figures, names, empty)
    if figures.raw("machine") is not None:
        wrongs += _lacks("a machine", figures, MACHINE)
    if figures.raw("server_said") is not None and figures.given("failed") == 0:
        wrongs += _lacks("a client's result without failures", figures, ("mean_in_system",))
    is_run = figures.raw("counters_after_all_runs") is not None
    if is_run and isinstance(columns := figures.raw("metrics.columns"), list):
        wrongs += [f"readings have {name}, and it is absent" for name in COLUMNS if name not in columns]
    for together in (ASKED, MEANS):
        if is_run and any(figures.raw(name) is not None for name in together):
            wrongs += _lacks(f"a result with {together[0]}", figures, together)
    return first(wrongs)


def alike(figures: Figures) -> str | None:
    """Check that objects of one kind have the same fields: counters, latencies, the requests' records."""
    wrongs: list[str | None] = []
    for names in COUNTERS:
        wrongs += _same_names(
            {name: each for name in names if isinstance(each := figures.raw(name), Mapping)}
        )
    latencies = {name: each for name in LATENCIES if isinstance(each := figures.raw(name), Mapping) and each}
    if figures.raw("counters_after_all_runs") is not None:
        wrongs += _same_names(latencies)
    if figures.raw("records") is not None:
        wrongs += _same_names(_answered(figures))
    counted = any(figures.raw(name) is not None for names in COUNTERS for name in names)
    if not counted and not latencies and figures.raw("records") is None:
        raise NotCheckable("there are no two objects of one kind")
    return first(wrongs)


def _answered(figures: Figures) -> dict[str, dict[str, Any]]:
    """Return the records of answers, without the fields that a server states for some only."""
    return {
        f"record {record.get('id', number)}": {name: None for name in record if name not in OF_SOME}
        for number, record in enumerate(figures.records())
        if record.get("finish_reason") in DONE
    }


def _same_names(objects: Mapping[str, Mapping[str, Any]]) -> list[str | None]:
    every = {name for each in objects.values() for name in each}
    return [
        f"{what} has no {name}, and others have it"
        for what, each in objects.items()
        for name in sorted(every - {*each})
    ]


LAWS = (
    Law("whole result", "what a verb writes together is there together", whole),
    Law("alike", "objects of one kind have the same fields", alike),
)
