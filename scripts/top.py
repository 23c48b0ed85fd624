"""What is a server doing right now?

    python -m scripts.top URL [--every SECONDS] [--once]

Slots, pages, queue and rates, from the server's /metrics, until ctrl-C; the URL is http://HOST:PORT. A server
that needs a key is asked with the environment's API_KEY. --once prints one frame, of two readings, and ends.
"""

from __future__ import annotations

import argparse
import http.client
import os
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts import verb
from serving.api.api_keys import key_of_environment

_TIMEOUT_S = 10.0
_LONGEST_S = 3600.0  # between readings
_WIDTH = 48  # of a bar
_COLOURS = ("blue", "magenta", "green", "bright_black")


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of one scrape, by name and by the label that is the metric's own; `at_s` is when."""

    at_s: float
    values: dict[str, dict[str, float]]
    model: str

    def get(self, name: str, label: str = "") -> float:
        """A number; 0 if there is none."""
        return self.values.get(name, {}).get(label, 0.0)

    def per_s(self, before: Reading, name: str, label: str = "") -> float:
        """How fast it grew since another reading; a server that was started anew begins from 0."""
        grown = self.get(name, label) - before.get(name, label)
        return max(0.0, grown) / max(1e-9, self.at_s - before.at_s)

    def quantile(self, before: Reading, name: str, part: float) -> float | None:
        """Of a histogram's values since another reading, as Prometheus would guess; None without any."""
        bounds = sorted((float(bound), bound) for bound in self.values.get(f"{name}_bucket", {}))
        counts = [self.get(f"{name}_bucket", each) - before.get(f"{name}_bucket", each) for _, each in bounds]
        if not counts or counts[-1] <= 0:
            return None
        rank, edges = part * counts[-1], [(0.0, 0.0), *zip((bound for bound, _ in bounds), counts)]
        for (low, below), (high, within) in pairwise(edges):
            if within >= rank:
                return low if high == float("inf") else low + (high - low) * (rank - below) / (within - below)
        return None


def parse(text: str, at_s: float) -> Reading:
    """Read what /metrics says; raises ValueError if it is no such text."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = sample.labels.get("model_name", model)
            own = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            values[sample.name][own[0] if len(own) == 1 else ""] = sample.value
    return Reading(at_s, dict(values), model)


def read(url: str) -> Reading:
    """Ask a server; raises OSError or ValueError in one line."""
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics")
    if key := key_of_environment():
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        mend = "; set the environment's API_KEY to a key of it" if error.code == 401 else ""
        raise OSError(f"{url}/metrics answers {error.code} {error.reason}{mend}") from None
    except http.client.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}; write http://HOST:PORT") from None
    except http.client.HTTPException:
        raise OSError(f"{url} does not answer in HTTP; is it the port of a server of ours?") from None
    except OSError as error:
        raise OSError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    reading = parse(text, time.monotonic())
    if "cb_engine_up" not in reading.values:
        raise ValueError(f"{url}/metrics is not of a server of ours: it has no cb_engine_up")
    return reading


def bar(parts: list[float]) -> Text:
    """A line of coloured parts."""
    whole, line, end = max(1.0, sum(parts)), Text(), 0.0
    for part, colour, sign in zip(parts, _COLOURS, "█▓▒·"):
        start, end = end, end + part
        line.append(sign * (round(_WIDTH * end / whole) - round(_WIDTH * start / whole)), colour)
    return line


def frame(now: Reading, before: Reading) -> Panel:
    """All of it."""
    running, slots = now.get("cb_requests_running"), now.get("cb_slots")
    shared = now.get("cb_kv_pages_shared")
    pages = [now.get("cb_kv_pages_used") - shared, shared]
    pages += [now.get("cb_kv_pages_cached"), now.get("cb_kv_pages_free")]
    waits = [why for why, count in now.values.get("cb_requests_waiting_for", {}).items() if count]
    bars = Table.grid(padding=(0, 1))
    bars.add_row("slots", bar([running, 0, 0, slots - running]), f"{running:.0f} of {slots:.0f}")
    legend = "{:.0f} used, {:.0f} shared, {:.0f} cached, {:.0f} free".format(*pages)
    bars.add_row("pages", bar(pages), legend)
    waiting = f"{now.get('cb_requests_queued'):.0f} wait"
    bars.add_row("queue", Text(f"{waiting} for {', '.join(waits)}" if waits else waiting))
    is_up = bool(now.get("cb_engine_up"))
    state = "up" if is_up else f"[red]down, silent {now.get('cb_engine_step_age_seconds'):.1f} s[/red]"
    restarts = f"{now.get('cb_engine_restarts_total'):.0f} restarts"
    return Panel(
        Group(bars, "", _rates(now, before)), title=f"{escape(now.model)}: engine {state}, {restarts}"
    )


def _rates(now: Reading, before: Reading) -> Table:
    def rate(name: str, label: str = "") -> str:
        return f"{now.per_s(before, name, label):.1f}/s"

    def times(name: str) -> str:
        found = [now.quantile(before, name, part) for part in (0.5, 0.95)]
        return " / ".join("-" if each is None else f"{1e3 * each:.0f} ms" for each in found)

    asked = now.per_s(before, "cb_prefix_queried_tokens_total")
    hits = now.per_s(before, "cb_prefix_hit_tokens_total")
    memory = [now.get(f"{whose}process_resident_memory_bytes") for whose in ("", "cb_engine_")]
    table = Table.grid(padding=(0, 3))
    for row in (
        (
            "requests",
            rate("cb_requests_total"),
            "first token p50 / p95",
            times("cb_time_to_first_token_seconds"),
        ),
        (
            "tokens out",
            rate("cb_tokens_generated_total"),
            "next token p50 / p95",
            times("cb_inter_token_latency_seconds"),
        ),
        (
            "prompt tokens",
            rate("cb_prefill_tokens_total"),
            "step p50 / p95",
            times("cb_iteration_latency_seconds"),
        ),
        ("steps", rate("cb_steps_total"), "prompt tokens cached", f"{hits / asked:.0%}" if asked else "-"),
        ("not taken", rate("cb_rejects_total", "queue_full"), "preemptions", rate("cb_preemption_total")),
        (
            "failed",
            rate("cb_sample_ends_total", "error"),
            "memory: server, engine",
            ", ".join(f"{each / 2**20:.0f} MiB" for each in memory),
        ),
    ):
        table.add_row(*row)
    return table


def watch(url: str, every_s: float) -> None:
    """Draw a frame every so often; while the server does not answer, say so."""
    before = now = read(url)
    with Live(frame(now, before), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                before, now = now, read(url)
                live.update(frame(now, before), refresh=True)
            except OSError as error:
                live.update(Panel(Text(str(error), "red")), refresh=True)


def main(argv: list[str]) -> None:
    """Watch, or look once."""
    options = argparse.ArgumentParser(
        prog="python -m scripts.top", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("url", help="such as http://127.0.0.1:8000")
    options.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between readings")
    options.add_argument("--once", action="store_true", help="print one frame")
    asked = options.parse_args(argv)
    if not 0 < asked.every <= _LONGEST_S:
        raise ValueError(f"--every is {asked.every:g} s; it must be above 0, at most {_LONGEST_S:g}")
    if not asked.url.startswith(("http://", "https://")):
        raise ValueError(f"{asked.url!r} is no URL; it begins with http:// or https://")
    if not asked.once:
        watch(asked.url, asked.every)
        return
    before = read(asked.url)
    time.sleep(asked.every)
    Console(width=None if os.isatty(1) else 100).print(frame(read(asked.url), before))


if __name__ == "__main__":
    verb.run(main)
