"""List the fields that a result holds only once, so that no law can tell a changed one from a true one.

Digests (`benchmark.gate.facts`) protect them from a change of the file that leaves its digests alone. Each
pattern is of dotted names, and has a reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

SETTING = "a setting that shows in no measured figure"
NAME = "a name; what it names is not in the file"
VERSION = "a version, or a name, that nothing measured depends on"
LIMIT = "a limit: one that was not reached may be any larger one"
MODEL = "follows from the model's configuration, which is not in the file"
_SETTINGS = (
    *("model.*", "device.*", "server", "server.*", "cache.compact_*", "cache.prefix_sharing"),
    *("adapters.*", "cache.events*", "parallel.expert", "parallel.*_timeout_s"),
    *("cache.reserve_gib", "scheduler.chunk", "scheduler.fair_tenants", "scheduler.outrank"),
    *("scheduler.overlap", "scheduler.queue", "scheduler.seed", "scheduler.victim", "scheduler.policy"),
)
ALONE: dict[str, str] = {
    **{f"{recipe}.{name}": SETTING for recipe in ("settings", "server.recipe") for name in _SETTINGS},
    **{f"{recipe}.scheduler.max_batch_tokens": LIMIT for recipe in ("settings", "server.recipe")},
    **dict.fromkeys(("recipe", "overrides*", "trace", "trace_sha256", "model_id", "base_url"), NAME),
    **{
        f"{of}machine.{name}": VERSION
        for of in ("", "server.")
        for name in ("cpu", "cores", "python", "numpy", "torch", "torch_npu", "triton", "transformers")
    },
    "machine.preloaded": VERSION,
    "server.machine.preloaded": VERSION,
    "computed_on.attention": NAME,
    "computed_on.memory_gib": LIMIT,
    "peak_rss_gib": "the process's memory is read once",
    "weight_bytes_per_step": MODEL,
    "kv_bytes_per_token": MODEL,
    "page_bytes": MODEL,
    "max_tokens_per_step": MODEL,
    "cache_after_all_runs.fragmentation": "how free pages lie is read once",
    "cache_after_all_runs.lookups.*": "what newcomers found is counted once; only their number is known",
    "clock.cpu_s": "the processor's time is bounded by that of the readings and of the cores, no more",
    "client.lag_ms.*": "the looks at the event loop are not kept",
    "goodput.*": "an objective that every request meets may be any larger one",
    "server_said*": "what another server says of itself is on that page alone",
    "warm_up_runs": "a server may have served anybody before",
    "records.*.end_s": "when a connection closed, after its last token, only the number open at once tells",
    "settings.scheduler.num_slots": LIMIT,  # equals `slots`, except in a run of batches
    "settings.cache.num_pages": LIMIT,  # equals `num_pages`, except in a run of batches
}


def is_alone(name: str, fields: frozenset[str] = frozenset()) -> bool:
    """Return whether no law can check a field, by its dotted name; `fields` are those of its result."""
    if name in ("settings.scheduler.num_slots", "settings.cache.num_pages") and "slots" in fields:
        return False
    return any(fnmatchcase(name, pattern) for pattern in ALONE)
