"""Define the laws of what a server says about itself, beside what its clients saw.

A server of this project says more than others: its recipe, and counters of each part of a request's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.gate import elsewhere as other
from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from benchmark.gate.machine import kind_of

COLUMNS = ("at_s", "wall_s", "running", "waiting", "kv_usage")
# Counters that count each request once.
COUNTS = ("requests", "ttft_count", "queue_count", "prefill_count", "e2e_count")
# Fields that a server of this project states; a server that states all but one counts as one too.
SAID = ("model", "version", "recipe", "machine", "device", "num_slots", "num_pages", "page_size")
PARTS_S = 1e-4  # tolerance of sums of times given in microseconds
OF_TIMES = 0.01  # relative tolerance of a request's time: an answer may end a little after its last token
PAGE = 0.01  # tolerance, in pages, of a share that stands for a whole number of pages
GAUGES = {"running": "mean_running", "waiting": "mean_waiting", "kv_usage": "mean_kv_usage"}
GROWN = {  # a figure about a server -> the counters from which it is computed
    "preemptions": ("preemptions",),
    "prefix_hit_rate": ("prefix_queries", "prefix_hits"),
    "mean_queue_ms": ("queue_s", "queue_count"),
    "mean_prefill_ms": ("prefill_s", "prefill_count"),
}


def described(figures: Figures) -> Mapping[str, Any]:
    """Return what a server of this project says about itself; raises NotCheckable for another server."""
    server = figures.raw("server")
    if not isinstance(server, Mapping) or len(_absent(server)) > 1:
        raise NotCheckable("no server of this project says how it runs")
    return server


def _absent(server: Mapping[str, Any]) -> list[str]:
    return [name for name in SAID if server.get(name) is None]


def words(figures: Figures) -> str | None:
    """Check that a server's pages agree on its model and its versions."""
    server, said = described(figures), figures.raw("server_said")
    if not isinstance(said, Mapping):
        raise NotCheckable("server_said is absent")
    if absent := _absent(server):
        return f"server has {', '.join(name for name in SAID if name not in absent)}, but no {absent[0]}"
    wrongs: list[str | None] = []
    machine, recipe = server["machine"], server["recipe"]
    for page, names in (("/version", {"version": server, "torch": machine, "python": machine}),):
        for name, ours in names.items():
            theirs = (said.get(page) or {}).get(name)
            if theirs != ours.get(name):
                wrongs.append(f"{page} says {name} {theirs!r}, but server says {ours.get(name)!r}")
    listed = (said.get("/v1/models") or {}).get("data") or []
    wrongs += [
        f"/v1/models has {each.get('object')!r} among its models"
        for each in listed
        if each.get("object") != "model"
    ]
    names = [each.get("id") for each in listed]
    for name, stated in (("model_id", figures.raw("model_id")), ("server.model", server.get("model"))):
        if stated is not None and stated not in names:
            wrongs.append(f"{name} is {stated!r}, but /v1/models has {names}")
    kind, device = (recipe.get("device") or {}).get("kind"), server["device"]
    if kind != kind_of(str(device)) and not recipe["device"].get("virtual"):
        wrongs.append(f"server.device is {device!r}, but server.recipe is for a {kind}")
    wrongs += [
        f"server.machine.{name} is absent"
        for name in ("cpu", "cores", "python", "numpy", "preloaded")
        if machine.get(name) is None
    ]
    return first(wrongs)


def straddling(figures: Figures) -> float:
    """Return the most requests that were there at the first or the last reading, or failed.

    Counters on one side of a reading count such a request, and those on the other side do not.
    """
    running, waiting = figures.column("running"), figures.column("waiting")
    there = float(running[0] + waiting[0] + running[-1] + waiting[-1])
    return there + (figures.given("failed") or 0.0) + (figures.given("retried") or 0.0)


def sums(figures: Figures) -> str | None:
    """Check that a server of this project counts each request, and each of its tokens, once."""
    described(figures)
    grown = {name: other.server_growth(name)(figures) for name in figures.raw("metrics.after") or {}}
    if not {*COUNTS, "itl_count", "output_tokens"} <= {*grown}:
        raise NotCheckable("the server's counters are not all there")
    slack, completed = straddling(figures), figures.number("completed")
    wrongs = [
        differs(
            f"the growth of {name}", grown[name], "that of the server's requests", grown["requests"], slack
        )
        for name in COUNTS[1:]
    ]
    wrongs += [
        exceeds("completed", completed, f"the growth of the server's {name}", grown[name], 0)
        for name in COUNTS
    ]
    for when in ("before", "after"):
        counted = {name: figures.number(f"metrics.{when}.{name}") for name in grown}
        tokens = counted["ttft_count"] + counted["itl_count"]
        what = f"metrics.{when}.ttft_count + itl_count"
        wrongs.append(exceeds(what, tokens, "the tokens of its answers", counted["output_tokens"], 0))
        wrongs.append(exceeds("prefix_hits", counted["prefix_hits"], "queries", counted["prefix_queries"], 0))
        early = counted["queue_s"] + counted["prefill_s"]
        wrongs.append(exceeds(f"{when}: queue_s + prefill_s", early, "ttft_s", counted["ttft_s"], PARTS_S))
        if slack == 0 or grown["e2e_count"] > 10 * slack:
            way_s, whole_s = counted["ttft_s"] + counted["itl_s"], counted["e2e_s"]
            most = max(1.0, counted["e2e_count"])
            near_s = PARTS_S + (OF_TIMES + slack / most) * whole_s
            wrongs.append(differs(f"{when}: ttft_s + itl_s", way_s, "e2e_s", whole_s, near_s))
    return first([*wrongs, *_ours(figures, grown)])


def _ours(figures: Figures, grown: Mapping[str, float]) -> list[str | None]:
    """Check the counters of a server that served only these requests."""
    try:
        other.alone_at_server(figures)
    except NotCheckable:
        return []
    completed = figures.number("completed")
    cached = [record.get("cached_tokens") for record in figures.records()]
    expected = {
        "itl_count": figures.number("output_tokens") - completed,
        "prefix_queries": figures.number("prompt_tokens"),
        **({} if None in cached else {"prefix_hits": float(sum(cached))}),
    }
    if figures.number("metrics.after.preemptions") != figures.number("metrics.before.preemptions"):
        del expected["prefix_queries"]  # a preempted request looks up its prefix again
        expected.pop("prefix_hits", None)
    return [
        differs(f"the growth of the server's {name}", grown[name], "what its clients saw", seen, 0)
        for name, seen in expected.items()
    ]


def readings(figures: Figures) -> str | None:
    """Check that a server's gauges have their names, and possible values."""
    if figures.raw("benchmark") != "serve" or figures.raw("metrics") is None:
        raise NotCheckable("the readings were taken at steps")
    columns = figures.raw("metrics.columns")
    if not isinstance(columns, list) or columns != [name for name in COLUMNS if name in columns]:
        return f"metrics.columns is {columns!r}; it must be of {', '.join(COLUMNS)}, in this order"
    wrongs = [
        f"metrics.{name} is absent"
        for name in ("before", "after", "readings")
        if figures.raw(f"metrics.{name}") is None
    ]
    if wrongs or not {"at_s", "wall_s"} <= {*columns}:
        return first([*wrongs, "a reading has its time by two clocks"])
    middle = len(figures.raw("metrics.readings")) > 2
    for name in GAUGES:
        if name not in columns or any(
            row[columns.index(name)] is None for row in figures.raw("metrics.readings")
        ):
            continue
        found = figures.column(name)
        if middle and figures.raw(f"metrics.{GAUGES[name]}") is None:
            wrongs.append(f"metrics.{GAUGES[name]} follows from the readings, and it is absent")
        if found.min() < 0:
            wrongs.append(f"{name} of a reading is {found.min():g}, below 0")
        if name == "kv_usage":
            wrongs.append(exceeds("kv_usage of a reading", float(found.max()), "the whole", 1.0, 0))
        elif (found != found.round()).any():
            wrongs.append(f"{name} of a reading is no whole number")
    after = figures.raw("metrics.after")
    for name, parts in GROWN.items():
        if figures.raw(f"metrics.{name}") is not None or any(part not in after for part in parts):
            continue
        if other.server_growth(parts[0])(figures) > 0 or len(parts) == 1:
            wrongs.append(f"metrics.{name} follows from the counters, and it is absent")
    return first([*wrongs, *_pages(figures, columns), *_most(figures, columns)])


def _pages(figures: Figures, columns: list[str]) -> list[str | None]:
    """Check that a share of the pages is a whole number of pages."""
    server = figures.raw("server")
    pages = server.get("num_pages") if isinstance(server, Mapping) else None
    if not isinstance(pages, int) or "kv_usage" not in columns:
        return []
    held = figures.column("kv_usage") * pages
    off = abs(held - held.round()) > PAGE
    return [f"kv_usage x num_pages of a reading is {held[off][0]:g}, no whole number"] if off.any() else []


def _most(figures: Figures, columns: list[str]) -> list[str | None]:
    """Check that no more run or wait than were on their way, at a server that serves only these requests."""
    if not {"running", "waiting"} <= {*columns}:
        return []
    try:
        other.alone_at_server(figures)
    except NotCheckable:
        return []
    there = (figures.column("running") + figures.column("waiting"))[1:]  # the first reading may see a warm-up
    if not len(there):
        return []
    most = figures.number("max_concurrent_requests")
    return [exceeds("running + waiting of a reading", float(there.max()), "max_concurrent_requests", most, 0)]


LAWS = (
    Law("server's words", "its pages name one model, one version and one device", words, "server"),
    Law("server's sums", "it counts each request once on each part of its way", sums, "server"),
    Law(
        "server's readings", "its gauges have their names, and values that there can be", readings, "metrics"
    ),
)
