"""Measure how a server bears increasing load: one run of `serve` at each rate, each in its own file.

The server runs already (--base-url), or is one of this project, started for each setting that --try gives
(--recipe). An interrupted sweep continues where it was: a rate whose file exists and is whole is not run
again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.gate.gate import audit
from benchmark.gate.result import read_result
from benchmark.processes import END_S, ServerProcess, serving
from benchmark.serve.measure import ServePlan, measure, plan_of, save
from recipes.schema.reader import load

MOST_NAME = 120  # characters of a folder's name
Result = dict[str, Any]
WITHIN = 0.99  # least share of requests within the objectives at a rate that a server is said to bear


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """A recipe with overrides; `tried` are the overrides in which a sweep's settings differ."""

    recipe: str
    overrides: tuple[str, ...]
    tried: tuple[str, ...]
    sha256: str  # digest of the recipe as it was read
    drain_s: float

    @property
    def name(self) -> str:
        """The tried overrides as the name of a folder; a shortened name gets a digest, to stay unique."""
        text = ",".join(self.tried)
        safe = re.sub(r"[^\w.,=+-]", "_", text)[:MOST_NAME]
        return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def identity(self) -> dict[str, object]:
        """Return the fields that a result of this setting must have."""
        return {"recipe": self.recipe, "overrides": list(self.overrides), "recipe_sha256": self.sha256}


def settings_of(recipe: str, overrides: Sequence[str], tries: Sequence[Sequence[str]]) -> list[SweepSetting]:
    """Return every setting, in the order given; raises ValueError for one that the recipe cannot have."""
    names = [each[0].partition("=")[0] for each in tries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--try {min(twice)} is given twice; part its values by commas")
    settings = []
    for tried in itertools.product(*tries):
        read = load(recipe, [*overrides, *tried])
        described = json.dumps(read.described(), sort_keys=True, default=str)
        digest = hashlib.sha256(described.encode()).hexdigest()
        settings.append(SweepSetting(recipe, (*overrides, *tried), tried, digest, read.server.drain_s))
    return settings


def command(setting: SweepSetting) -> list[str]:
    """Return the command that serves a setting at a free port of this machine; the server logs the port."""
    serve = [sys.executable, "-m", "scripts.serve", str(Path(setting.recipe).resolve())]
    return [*serve, *setting.overrides, "--host", "127.0.0.1", "--port", "0"]


def start_setting(
    setting: SweepSetting, log: Path, timeout_s: float
) -> AbstractContextManager[ForeignServer | ServerProcess]:
    """Start a server of a setting, which is ready once the context is entered, and ends with it."""
    return serving(setting.name, command(setting), log, timeout_s, setting.drain_s + END_S)


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """A server that someone else started, and will stop."""

    url: str

    def check(self) -> None:
        """Check nothing: requests report the failures of a server that this sweep did not start."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One server, how it is started, and the folder of its results at each rate."""

    name: str
    folder: Path
    start: Callable[[], AbstractContextManager[ForeignServer | ServerProcess]]
    of: Mapping[str, object] = field(default_factory=dict)


def legs(options: argparse.Namespace) -> list[Leg]:
    """Return the servers to measure; raises ValueError, before anything runs, for what is not possible."""
    if (options.base_url is None) == (options.recipe is None):
        raise ValueError("give one of --base-url, a server that runs, and --recipe, one to be started")
    if bool(options.tries) != bool(options.recipe):
        raise ValueError("--recipe and --try KEY=V1,V2 go together: one server is started for each value")
    if not options.recipe:
        there = ForeignServer(options.base_url)
        return [Leg("", options.result_dir, lambda: nullcontext(there))]
    recipe, *overrides = options.recipe
    found = []
    for each in settings_of(recipe, overrides, options.tries):
        folder = options.result_dir / each.name
        start = partial(start_setting, each, folder / "server.log", options.ready_check_timeout_sec)
        found.append(Leg(each.name, folder, start, each.identity()))
    return found


def finished(path: Path, said: dict[str, object]) -> Result | None:
    """Return an existing result, audited again, since the file may have been changed.

    Returns None where there is none that can be read. Raises ValueError for a result of other settings.
    """
    try:
        result = read_result(path)
    except FileNotFoundError:
        return None
    except ValueError as damage:
        print(f"{damage}; it is measured again", file=sys.stderr)
        return None
    if "verdict" not in result:
        return None
    other = [name for name, value in said.items() if result.get(name) != json.loads(json.dumps(value))]
    if other:
        raise ValueError(
            f"{path} is of another sweep: its {', '.join(other)} differ; choose another --result-dir"
        )
    return {**result, "verdict": audit(result).describe()}


def run(options: argparse.Namespace) -> None:
    """Measure each rate of each server, and print a line for each; then write the page."""
    gone_over, plan = legs(options), plan_of(options, None)
    from benchmark.serve import report  # matplotlib takes a second to load

    width = max(len(leg.name) for leg in gone_over)
    head = f"{'offered/s':>10}{'served/s':>10}{'good/s':>10}{'TTFT p99':>12}{'ITL p99':>12}  verdict"
    print(f"{'setting' if width else '':{width}}{head}")
    page = options.result_dir / "report.html"
    bears: dict[str, float] = {}
    for leg in gone_over:
        for rate, result in results(leg, plan, options, page):
            print(f"{leg.name:{width}}{row(rate, result)}", flush=True)
            if result.get("good_share", 0) >= WITHIN and not result["verdict"]["refused"]:
                bears[leg.name] = max(rate, bears.get(leg.name, 0.0))
    if plan.objectives is not None:
        print(f"within the objectives for {WITHIN:.0%} of requests: {most(bears)}")
    if options.recipe or not page.exists():  # an existing page may show other settings
        report.write([report.read(leg.folder) for leg in gone_over], page)
    print(page)


def results(
    leg: Leg, plan: ServePlan, options: argparse.Namespace, page: Path
) -> Iterator[tuple[float, Result]]:
    """Yield one server's result at each rate; it is started for the first rate without a result."""
    with ExitStack() as stack:
        server = None
        for rate in options.request_rates:
            salt = {} if options.share_prefixes else {"cache_salt": f"rate {rate:g}"}
            point = replace(plan, request_rate=rate, extra={**salt, **plan.extra}, of=leg.of)
            path = leg.folder / f"rate-{rate:g}.json"
            result = finished(path, point.settings())
            if result is None:
                server = server or stack.enter_context(leg.start())
                try:
                    result = measure(replace(point, base_url=server.url))
                finally:
                    server.check()  # checked before unanswered requests of a server that has ended are saved
                save(path, result)
                page.unlink(missing_ok=True)
            yield rate, result


def most(bears: Mapping[str, float]) -> str:
    """Format the highest rate that was borne, and among several settings the settings that bore it."""
    if not bears:
        return "none of these rates"
    highest = max(bears.values())
    by = [name for name, rate in bears.items() if name and rate == highest]
    return f"{highest:g} requests/s" + (f" at most, by {' and '.join(by)}" if by else "")


def row(rate: float, result: Result) -> str:
    """Format one line of the table."""
    numbers = [result["request_throughput"], result.get("request_goodput")]
    cells = "".join("-".rjust(10) if value is None else f"{value:>10.3f}" for value in numbers)
    for name in ("p99_ttft_ms", "p99_itl_ms"):
        cells += "-".rjust(12) if result.get(name) is None else f"{result[name]:>12.2f}"
    verdict = result["verdict"]
    return f"{rate:>10g}{cells}  {', '.join([verdict['outcome'], *verdict['refused']])}"
