"""Detect a change of the facts in a result: what was run, and where.

A fact is stated once, as a recipe, a version or a count of bytes are, so nothing else in the file can tell a
wrong one. Each is therefore kept with its digest, beside the names of all fields, so that none is lost in
silence. The tables of the small benchmarks are facts too. This guards against a changed file, not against
someone who computes the digests again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmark.gate.law import Figures, Law, NotCheckable, first

FACTS = frozenset(
    {
        *(
            "benchmark",
            "recipe",
            "recipe_sha256",
            "overrides",
            "profile",
            "settings",
            "trace",
            "trace_sha256",
        ),
        *("machine", "computed_on", "device_profile", "num_devices", "weight_bytes_per_step"),
        *("kv_bytes_per_token", "page_size", "page_bytes", "max_tokens_per_step", "peak_rss_gib"),
        *("warm_up_runs", "warm_up_counted", "batch_size", "input_len", "output_len", "seed"),
        *("backend", "endpoint", "base_url", "model_id", "loop", "request_rate", "max_concurrency"),
        *("extra_body", "retry_rejected", "retried", "goodput", "date", "server", "server_said", "errors"),
        *("cache_after_all_runs.lookups", "cache_after_all_runs.fragmentation", "client.lag_ms"),
        *(
            "client.cpu_share",
            "client.tokens_counted_by_pieces",
            "counters",
            "counters_after_all_runs",
            "clock.started_at",
        ),
        *("metrics.columns", "batches.columns", "cache_after_all_runs.idle_pages"),
        *(f"cache_after_all_runs.{name}_host_pages" for name in ("swapped", "resting", "free")),
        *("transformers_batch_size", "transformers_output_tokens_per_s", "times_transformers"),
        *("SIMULATED", "costs", "devices", "case", "threads", "waiting", "candidates", "load"),
    }
)
LATER = ("facts", "verdict")  # fields that are added when the facts are known
SMALL = ("host", "device", "kv", "simulation", "stall")  # no file of these benchmarks states a figure twice
SHOWN = 16  # hexadecimal digits of a digest that are kept


def digests(fields: Mapping[str, Any]) -> dict[str, str | None]:
    """Return every field of a result by its dotted name, with the digest of its value if it is a fact."""
    is_small = fields.get("benchmark") in SMALL
    found = {name: digest(each) for name, each in fields.items()} if is_small else dict(_fields(fields, ""))
    return {name: found[name] for name in sorted(found) if name.split(".")[0] not in LATER}


def _fields(value: Mapping[str, Any], before: str) -> Iterator[tuple[str, str | None]]:
    for part, each in value.items():
        name = f"{before}{part}"
        if name in FACTS:
            yield name, digest(each)
        elif isinstance(each, Mapping):
            yield from _fields(each, f"{name}.")
        else:
            yield name, None


def digest(value: Any) -> str:
    """Return the digest of a value as JSON, whatever the order of its fields."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN]


def unchanged(figures: Figures) -> str | None:
    """Check that every field is there, and that every fact is unchanged."""
    stated = figures.raw("facts")
    if not isinstance(stated, dict):
        raise NotCheckable("facts is absent")
    found = digests(figures.stated)
    wrongs: list[str | None] = []
    for name in sorted({*stated, *found}):
        if name not in found:
            wrongs.append(f"{name} was there when the result was made, and is absent")
        elif name not in stated:
            wrongs.append(f"{name} was not there when the result was made")
        elif stated[name] != found[name]:
            wrongs.append(f"{name} was changed: its digest is {found[name]}, but facts says {stated[name]}")
    return first(wrongs)


LAWS = (Law("facts", "what was run, where, is as it was when the result was made", unchanged, "facts"),)
