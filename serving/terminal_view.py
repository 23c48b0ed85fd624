"""Show a running server in a terminal: slots, pages, queue and rates, read from its /metrics."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from serving.api.api_keys import key_of_environment

_TIMEOUT_S = 10.0
LONGEST_INTERVAL_S = 3600.0
_BAR_WIDTH = 48
_DRAFTS = ("draft_tokens", "accepted_tokens")
_COLOURS = ("blue", "magenta", "green", "bright_black")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The numbers of one scrape at `at_s`, by name and by the value of the metric's own label."""

    at_s: float
    values: dict[str, dict[str, float]]
    model: str

    def get(self, name: str, label: str = "") -> float:
        """Return a number; 0 if there is none."""
        return self.values.get(name, {}).get(label, 0.0)

    def per_s(self, before: Scrape, name: str, label: str = "") -> float:
        """Return a number's rate of growth since another scrape; after a restart the server counts from 0."""
        grown = self.get(name, label) - before.get(name, label)
        return max(0.0, grown) / max(1e-9, self.at_s - before.at_s)

    def quantile(self, before: Scrape, name: str, part: float) -> float | None:
        """Estimate a quantile of a histogram's values since another scrape.

        The estimate is Prometheus's; without values it is None.
        """
        bounds = sorted((float(bound), bound) for bound in self.values.get(f"{name}_bucket", {}))
        counts = [self.get(f"{name}_bucket", each) - before.get(f"{name}_bucket", each) for _, each in bounds]
        if not counts or counts[-1] <= 0:
            return None
        rank, edges = part * counts[-1], [(0.0, 0.0), *zip((bound for bound, _ in bounds), counts)]
        for (low, below), (high, within) in pairwise(edges):
            if within >= rank:
                return low if high == float("inf") else low + (high - low) * (rank - below) / (within - below)
        return None


def parse(text: str, at_s: float) -> Scrape:
    """Return the numbers in the text of /metrics; raises ValueError if it is not such a text."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = sample.labels.get("model_name", model)
            own = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            values[sample.name][own[0] if len(own) == 1 else ""] = sample.value
    return Scrape(at_s, dict(values), model)


def read(url: str) -> Scrape:
    """Return the present numbers of a server; raises OSError or ValueError whose message is one line."""
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics")
    if key := key_of_environment():
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        fix = "; set the environment's API_KEY to a key of it" if error.code == 401 else ""
        raise OSError(f"{url}/metrics answers {error.code} {error.reason}{fix}") from None
    except http.client.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}; write http://HOST:PORT") from None
    except http.client.HTTPException:
        raise OSError(f"{url} does not answer in HTTP; is it the port of this server?") from None
    except OSError as error:
        raise OSError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    scrape = parse(text, time.monotonic())
    if "cb_engine_up" not in scrape.values:
        raise ValueError(f"{url}/metrics is not of this server: it has no cb_engine_up")
    return scrape


def bar(parts: list[float]) -> Text:
    """Return a line of coloured parts whose lengths are proportional to the numbers."""
    whole, line, end = max(1.0, sum(parts)), Text(), 0.0
    for part, colour, sign in zip(parts, _COLOURS, "█▓▒·"):
        start, end = end, end + part
        line.append(sign * (round(_BAR_WIDTH * end / whole) - round(_BAR_WIDTH * start / whole)), colour)
    return line


def frame(now: Scrape, before: Scrape) -> Panel:
    """Return the whole view."""
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
    restarts = f"{now.get('cb_engine_restarts_total'):.0f} restarts"
    return Panel(
        Group(bars, "", _rates(now, before)), title=f"{escape(now.model)}: engine {_state(now)}, {restarts}"
    )


def _state(now: Scrape) -> str:
    """Return the engine's state, and how long it has been silent where that matters."""
    silent = f"silent {now.get('cb_engine_step_age_seconds'):.1f} s"
    if not now.get("cb_engine_up"):
        return f"[red]down, {silent}[/red]"
    if now.get("cb_engine_slow"):
        return f"[yellow]slow, {silent} of {now.get('cb_engine_step_age_limit_seconds'):.1f} s[/yellow]"
    return "up"


def _rates(now: Scrape, before: Scrape) -> Table:
    def rate(name: str, label: str = "") -> str:
        return f"{now.per_s(before, name, label):.1f}/s"

    def times(name: str) -> str:
        found = [now.quantile(before, name, part) for part in (0.5, 0.95)]
        return " / ".join("-" if each is None else f"{1e3 * each:.0f} ms" for each in found)

    asked = now.per_s(before, "cb_prefix_queried_tokens_total")
    hits = now.per_s(before, "cb_prefix_hit_tokens_total")
    drafts, right = (now.per_s(before, f"vllm:spec_decode_num_{what}_total") for what in _DRAFTS)
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
        (
            "drafts",
            rate("vllm:spec_decode_num_draft_tokens_total"),
            "drafts right",
            f"{right / drafts:.0%}" if drafts else "-",
        ),
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
    """Draw a frame at this interval; while the server does not answer, say so."""
    before = now = read(url)
    with Live(frame(now, before), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                before, now = now, read(url)
                live.update(frame(now, before), refresh=True)
            except OSError as error:
                live.update(Panel(Text(str(error), "red")), refresh=True)
