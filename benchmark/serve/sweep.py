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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
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
class SweptServer:
    """A server that a sweep measures, and the fields, `of`, that a result of it must have.

    One that the sweep starts has in `of` its recipe with the overrides; its name is that of its folder.
    """

    name: str = ""
    of: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # its recipe and overrides
    drain_s: float = 0.0


def folder_name(tried: Sequence[str]) -> str:
    """Return the overrides in which settings differ as the name of a folder.

    A shortened name gets a digest, to stay unique.
    """
    text = ",".join(tried)
    safe = re.sub(r"[^\w.,=+-]", "_", text)[:MOST_NAME]
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def settings_of(recipe: str, overrides: Sequence[str], tries: Sequence[Sequence[str]]) -> list[SweptServer]:
    """Return every setting, in the order given; raises ValueError for one that the recipe cannot have."""
    names = [each[0].partition("=")[0] for each in tries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--try {min(twice)} is given twice; part its values by commas")
    settings = []
    for tried in itertools.product(*tries):
        read = load(recipe, [*overrides, *tried])
        described = json.dumps(read.described(), sort_keys=True, default=str)
        digest = hashlib.sha256(described.encode()).hexdigest()
        words = (recipe, *overrides, *tried)
        of = {"recipe": recipe, "overrides": [*words[1:]], "recipe_sha256": digest}
        settings.append(SweptServer(folder_name(tried), of, words, read.server.drain_s))
    return settings


def command(setting: SweptServer) -> list[str]:
    """Return the command that serves a setting at a free port of this machine; the server logs the port."""
    recipe, *overrides = setting.words
    serve = [sys.executable, "-m", "scripts.serve", str(Path(recipe).resolve())]
    return [*serve, *overrides, "--host", "127.0.0.1", "--port", "0"]


def start_setting(setting: SweptServer, log: Path, timeout_s: float) -> AbstractContextManager[ServerProcess]:
    """Start a server of a setting, which is ready once the context is entered, and ends with it."""
    return serving(setting.name, command(setting), log, timeout_s, setting.drain_s + END_S)


def servers_of(options: argparse.Namespace) -> list[SweptServer]:
    """Return the servers to measure; raises ValueError, before anything runs, for what is not possible."""
    if (options.base_url is None) == (options.recipe is None):
        raise ValueError("give one of --base-url, a server that runs, and --recipe, one to be started")
    if bool(options.tries) != bool(options.recipe):
        raise ValueError("--recipe and --try KEY=V1,V2 go together: one server is started for each value")
    return (
        settings_of(options.recipe[0], options.recipe[1:], options.tries)
        if options.recipe
        else [SweptServer()]
    )


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
    swept, plan = servers_of(options), plan_of(options, None)
    from benchmark.serve import report  # matplotlib takes a second to load

    width = max(len(each.name) for each in swept)
    head = f"{'offered/s':>10}{'served/s':>10}{'good/s':>10}{'TTFT p99':>12}{'ITL p99':>12}  verdict"
    print(f"{'setting' if width else '':{width}}{head}")
    page = options.result_dir / "report.html"
    bears: dict[str, float] = {}
    for each in swept:
        for rate, result in results(each, plan, options, page):
            print(f"{each.name:{width}}{row(rate, result)}", flush=True)
            if result.get("good_share", 0) >= WITHIN and not result["verdict"]["refused"]:
                bears[each.name] = max(rate, bears.get(each.name, 0.0))
    if plan.objectives is not None:
        print(f"within the objectives for {WITHIN:.0%} of requests: {most(bears)}")
    if options.recipe or not page.exists():  # an existing page may show other settings
        report.write([report.read(options.result_dir / each.name) for each in swept], page)
    print(page)


def results(
    swept: SweptServer, plan: ServePlan, options: argparse.Namespace, page: Path
) -> Iterator[tuple[float, Result]]:
    """Yield one server's result at each rate; it is started for the first rate without a result."""
    folder, server = options.result_dir / swept.name, None
    with ExitStack() as stack:
        for rate in options.request_rates:
            salted = {"cache_salt": f"rate {rate:g}", **plan.extra}  # no rate finds what one before computed
            point = replace(plan, request_rate=rate, extra=salted, of=swept.of)
            path = folder / f"rate-{rate:g}.json"
            result = finished(path, point.settings())
            if result is None:
                if server is None and swept.words:
                    log, timeout_s = folder / "server.log", options.ready_check_timeout_sec
                    server = stack.enter_context(start_setting(swept, log, timeout_s))
                try:
                    result = measure(point if server is None else replace(point, base_url=server.url))
                finally:
                    if server is not None:
                        server.check()  # before unanswered requests of a server that has ended are saved
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
