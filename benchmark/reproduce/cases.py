"""Run the cases of an experiment in simulation, let the gate judge them, and write the report.

A case is a load, and the engine to which it is offered. An experiment is defined before it is run: by its
source's claim, its cases, its table and its chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark import options as kinds
from benchmark.gate.gate import PublishedRow, published, with_verdict
from benchmark.options import figure, known_figure
from benchmark.processes import process_pool
from benchmark.simulate.deployment import SIMULATED, Deployment, Placement, place
from benchmark.workloads.synthetic import Draw, SyntheticLoad, draw_requests, lengths
from borders.files import whole_file
from continuous_batching.request import Request, SamplingParams
from recipes.schema.reader import read
from simulation.roofline import Roofline

Result = dict[str, Any]
Results = dict[str, Result]  # results by the label of the case
RECIPE = "recipes/bench/llama2_7b_cuda.yaml"  # Llama-2-7B has the shape of LLaMA-7B
KEYS = (  # Ascend 910 has no bfloat16; a prompt of 4,096 tokens needs room for its answer
    "model.dtype=float16",
    "device.graphs=0",
    "model.config.max_position_embeddings=8192",
    "scheduler.max_request_tokens=8192",
)
DEVICE, NUM_DEVICES = "ascend910", 8
OBJECTIVES = {"ttft": 1000.0, "tpot": 50.0}  # milliseconds
VOCAB_SIZE = 32_000
SIGMA = 0.8  # sigma of the logarithm of lengths: most are short, few are long
QUICK_REQUESTS, QUICK_SHORTER = 48, 8
WHOLE_TOKENS = 8192  # budget of a step that holds the longest prompt, and more
REPORT = "reproduced"  # the report is REPORT.md, and its pictures are in the folder REPORT
HEAD = """# The sources' experiments, re-run

This page answers: what the sources' experiments come to when the real scheduler runs them, beside each claim.

**SIMULATED, not measured.** The scheduler ran against a virtual clock, and the time of a step is the roofline
of a device that is not here. Trust ratios and orders of magnitude, not the second digit.

Device profile `{device}`: {costs}.

This command gives the same bytes again:

    {command}

The model is LLaMA-7B's shape (`{recipe} {keys}`)
on 8 devices that share each layer. Lengths of prompts and answers are
log-normal, of 256 tokens each on average unless said otherwise; arrivals are Poisson, and seeds fixed.
"Good" requests have their first token within {ttft:g} ms and a mean TPOT within {tpot:g} ms. The verdict is
the gate's (`python -m scripts.audit`) on the records of all requests; {num_passed} of {num_results} pass. A
claim's row names the laws that it breaks.
"""


@dataclass(frozen=True, slots=True)
class Offered:
    """Poisson arrivals of requests with log-normal lengths, cut at the most.

    The requests are the same for the same seed; another rate only changes their distance. Every
    `long_every`th prompt has `long_tokens`.
    """

    requests: int
    rate_per_s: float = math.inf  # inf: all at once
    prompt_tokens: int = 256  # mean, before the cut
    most_prompt_tokens: int = 1024
    answer_tokens: int = 256
    most_answer_tokens: int = 1024
    long_every: int = 0
    long_tokens: int = 0
    seed: int = 7

    def trace(self) -> list[Request]:
        """Return the requests, in order of arrival."""
        answers = _drawn(self.answer_tokens, self.most_answer_tokens)
        load = SyntheticLoad(self._prompts, answers, VOCAB_SIZE, self.seed, self.rate_per_s)
        return [
            Request(
                line["id"],
                np.array(line["prompt_token_ids"], dtype=np.int32),
                SamplingParams(max_tokens=line["max_tokens"], temperature=0.0, ignore_eos=True),
                arrival_s=line["arrival_s"],
            )
            for line in draw_requests(load, self.requests)
        ]

    def quick(self) -> Offered:
        """Return a much smaller load, to check that a case runs."""
        return replace(
            self,
            requests=min(self.requests, QUICK_REQUESTS),
            answer_tokens=max(4, self.answer_tokens // QUICK_SHORTER),
            most_answer_tokens=max(8, self.most_answer_tokens // QUICK_SHORTER),
        )

    def _prompts(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = _drawn(self.prompt_tokens, self.most_prompt_tokens)(random, count)
        if self.long_every:
            drawn[self.long_every // 2 :: self.long_every] = self.long_tokens
        return drawn


def _drawn(mean: int, most: int) -> Draw:
    draw = lengths(f"lognormal:{mean}:{SIGMA}")
    return lambda random, count: np.clip(draw(random, count), 2, most)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: the load, and the recipe's keys that it sets."""

    label: str
    offered: Offered
    keys: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """The label without the rate, which names a line in a chart."""
        return self.label.partition(", ")[0]

    def at(self, rate_per_s: float) -> Case:
        """Return the case at another rate."""
        name = "all at once" if rate_per_s == math.inf else f"{rate_per_s:g}/s"
        return replace(
            self, label=f"{self.label}, {name}", offered=replace(self.offered, rate_per_s=rate_per_s)
        )


def keys(**values: object) -> tuple[str, ...]:
    """Return keys of the recipe's scheduler section as overrides."""
    return tuple(f"scheduler.{name}={value}" for name, value in values.items())


def static(batch_size: int) -> tuple[str, ...]:
    """Return the keys of FasterTransformer's batching; the first of a batch waits 100 ms for the others."""
    sizes = {"num_slots": batch_size, "max_batch_tokens": WHOLE_TOKENS}
    return keys(policy="static", batch_size=batch_size, max_wait_ms=100, **sizes)


def chunked(tokens: int, num_slots: int = 64) -> tuple[str, ...]:
    """Return the keys of Sarathi's scheduling: decodes first, then chunks up to a step's budget."""
    return keys(policy="stall_free", num_slots=num_slots, max_batch_tokens=tokens)


def whole(policy: str, num_slots: int = 64) -> tuple[str, ...]:
    """Return the keys for prompts in one step: `orca` beside the decodes, `prefill_first` in their place."""
    return keys(policy=policy, num_slots=num_slots, max_batch_tokens=WHOLE_TOKENS)


def placement_of(case: Case) -> Placement:
    """Return the engine of a case; raises ValueError if it cannot run."""
    return place(read(RECIPE, [*KEYS, *case.keys], None).recipe, DEVICE, NUM_DEVICES)


def run(case: Case) -> Result:
    """Return the figures of one case, with their verdict and their records."""
    deployment = Deployment(placement_of(case))
    totals, own = deployment.serve(case.offered.trace(), None, records=True)
    figures = totals.figures()
    records = totals.records or []
    figures["itl_ms"]["max"] = round(1e3 * totals.itl.most_s, 3)
    good = num_good(records, **OBJECTIVES)
    return with_verdict(
        {
            "SIMULATED": SIMULATED,
            "case": case.label,
            "recipe": RECIPE,
            "overrides": [*KEYS, *case.keys],
            **deployment.placement.facts(),
            "devices": deployment.num_devices,
            "slots": deployment.num_slots,
            "max_tokens_per_step": 1,
            "warm_up_counted": 0,
            **figures,
            **own,
            "goodput": OBJECTIVES,
            "request_goodput": round(good / figures["duration_s"], 4),
            "records": records,
        }
    )


def num_good(records: Iterable[Result], ttft: float, tpot: float) -> int:
    """Return how many of the requests met both objectives, in milliseconds; TPOT is an answer's mean gap."""

    def is_good(each: Result) -> bool:
        first_s, gaps = each["first_token_s"], max(1, each["output_tokens"] - 1)
        is_soon: bool = 1e3 * (first_s - each["arrival_s"]) <= ttft
        return is_soon and 1e3 * (each["finish_s"] - first_s) / gaps <= tpot

    return sum(map(is_good, records))


def run_all(cases: Iterable[Case], jobs: int, report: Callable[[str], None]) -> dict[Case, Result]:
    """Run each case once, in several processes; the results do not depend on the order in which they end."""
    work = {case: case.offered.requests * case.offered.answer_tokens for case in cases}
    found: dict[Case, Result] = {}
    with process_pool(jobs) as pool:
        futures = {pool.submit(run, case): case for case in sorted(work, key=work.__getitem__, reverse=True)}
        for number, future in enumerate(as_completed(futures), 1):
            case = futures[future]
            found[case] = future.result()
            report(f"{number}/{len(work)}  {found[case]['verdict']['outcome']:8} {case.label}")
    return found


def alone_s(case: Case, num_tokens: int, chunk: int) -> float:
    """Return the seconds that a prompt alone takes on the engine, in chunks."""
    found = placement_of(case)
    roofline = found.costs()
    assert isinstance(roofline, Roofline), "nothing was fitted"
    layers, total_s = found.config.num_layers, 0.0
    for start in range(0, num_tokens, chunk):
        stop = min(num_tokens, start + chunk)
        pairs = layers * (stop - start) * (start + stop + 1) / 2
        total_s += roofline.time_s(stop - start, 1, int(stop == num_tokens), layers * stop, pairs)
    return total_s


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each result, by its dotted name, and the decimals with which it is printed."""

    name: str
    heading: str
    places: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture for each of the columns: bars, or lines over the offered rate."""

    columns: tuple[Column, ...]
    over_rate: bool = False
    log: bool = False


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a source.

    `claim` is what the source says, in words; `rows` names those of its rows that the gate audits; `findings`
    says how our results differ, and why.
    """

    name: str
    title: str
    claim: str
    cases: tuple[Case, ...]
    columns: tuple[Column, ...]
    chart: Chart
    findings: Callable[[Results], list[str]]
    rows: tuple[str, ...] = ()

    def quick(self) -> Experiment:
        """Return the experiment with little load; of several rates only the least and the largest."""
        kept = []
        for case in self.cases:
            rates = [each.offered.rate_per_s for each in self.cases if each.series == case.series]
            if case.offered.rate_per_s in (min(rates), max(rates)):
                kept.append(replace(case, offered=case.offered.quick()))
        return replace(self, cases=tuple(kept))


REQUESTS = Column("requests_per_s", "req/s", 2)
OUTPUT = Column("output_tokens_per_s", "output tokens/s", 0)
GOOD = Column("request_goodput", "good req/s", 2)
TTFT = Column("ttft_ms.p50", "TTFT p50, ms", 0)
TTFT_99 = Column("ttft_ms.p99", "TTFT p99, ms", 0)
TPOT = Column("tpot_ms.mean", "TPOT mean, ms")
ITL_99 = Column("itl_ms.p99", "ITL p99, ms")
ITL_MAX = Column("itl_ms.max", "ITL max, ms")
BATCH = Column("mean_batch", "mean batch")
PAGES = Column("mean_page_use", "pages in use, share", 4)


def reproduce(
    chosen: Sequence[Experiment], command: str, output: Path, jobs: int, figures: Path | None
) -> tuple[int, int, Path]:
    """Run experiments, and write report and pictures into a folder, and `figures` as JSON.

    Returns the number of cases, the number that the gate refused, and the path of the report.
    """
    output.mkdir(parents=True, exist_ok=True)
    if figures is not None:
        kinds.file(figures)  # checked before the runs; it may be in that folder
    found = run_all(
        [case for each in chosen for case in each.cases], jobs, lambda line: print(line, flush=True)
    )
    results = [(each, {case.label: found[case] for case in each.cases}) for each in chosen]
    path = write(output, command, results)
    if figures is not None:
        by_name = {
            each.name: {
                label: {name: value for name, value in one.items() if name != "records"}
                for label, one in ours.items()
            }
            for each, ours in results
        }
        with whole_file(figures) as file:
            json.dump(by_name, file, indent=1)
    num_refused = sum(result["verdict"]["outcome"] != "pass" for result in found.values())
    return len(found), num_refused, path


def write(folder: Path, command: str, experiments: Sequence[tuple[Experiment, Results]]) -> Path:
    """Write the report and its pictures; returns the report's path."""
    pictures = folder / REPORT
    pictures.mkdir(parents=True, exist_ok=True)
    path = folder / f"{REPORT}.md"
    results = [result for _, found in experiments for result in found.values()]
    said = {"device": results[0]["device_profile"], "costs": results[0]["costs"], "command": command}
    num_passed = sum(each["verdict"]["outcome"] == "pass" for each in results)
    counts = {"num_passed": num_passed, "num_results": len(results)}
    parts = [HEAD.format(**said, recipe=RECIPE, keys=" ".join(KEYS), **OBJECTIVES, **counts)]
    for experiment, found in experiments:
        draw(pictures / f"{experiment.name}.png", experiment, found)
        parts.append("\n".join(_section(experiment, found)))
    with whole_file(path) as file:
        file.write("\n".join(parts))
    return path


def _section(experiment: Experiment, results: Results) -> Iterator[str]:
    yield f"## {experiment.title}\n"
    yield f"Claim: {experiment.claim}\n"
    yield from _table(experiment, results)
    yield f"\n![{experiment.title}]({REPORT}/{experiment.name}.png)\n"
    for sentence in experiment.findings(results):
        yield f"- {sentence}"
    yield ""


def _table(experiment: Experiment, results: Results) -> Iterator[str]:
    columns = experiment.columns
    yield f"| | {' | '.join(column.heading for column in columns)} | verdict |"
    yield "|---|" + "---:|" * len(columns) + "---|"
    for case in experiment.cases:
        result = results[case.label]
        cells = [f"{figure(result, column.name):,.{column.places}f}" for column in columns]
        outcome, broken = (result["verdict"][part] for part in ("outcome", "refused"))
        yield f"| {case.label} | {' | '.join(cells)} | {outcome}{': ' * bool(broken)}{', '.join(broken)} |"
    audited = {row.name: row for row in published()}
    for name in experiment.rows:
        cells = [_claimed(audited[name].result, column.name) for column in columns]
        yield f"| *claimed: {name}* | {' | '.join(cells)} | {_broken(audited[name])} |"


def _claimed(claim: Any, name: str) -> str:
    name = {"mean_batch": "mean_running"}.get(name, name)  # the source names the mean batch so
    found = known_figure(claim, name)
    return "" if found is None else f"{found:,g}"


def _broken(row: PublishedRow) -> str:
    return "refused: " + ", ".join(each.law.name for each in row.verdict.of("refused"))


def draw(path: Path, experiment: Experiment, results: Results) -> None:
    """Draw the chart of an experiment."""
    # The import is here because it brings matplotlib: each process that runs cases imports this module too
    from benchmark.charts import draw_bars, draw_lines, save_simulated

    chart, cases = experiment.chart, experiment.cases
    width = 1.2 + 3.6 * len(chart.columns)

    def values(column: Column, of: Sequence[Case]) -> list[float]:
        return [figure(results[case.label], column.name) for case in of]

    if chart.over_rate:
        names = dict.fromkeys(case.series for case in cases)
        series = {name: [case for case in cases if case.series == name] for name in names}
        lines = {
            column.heading: {
                name: ([case.offered.rate_per_s for case in same], values(column, same))
                for name, same in series.items()
            }
            for column in chart.columns
        }
        save_simulated(path, (width, 3.2), len(lines), lambda axes: draw_lines(axes, lines, log=chart.log))
        return
    panels = [(each.heading, values(each, cases), f"{{:,.{each.places}f}}") for each in chart.columns]
    labels, size = [case.label for case in cases], (width, 0.8 + 0.22 * len(results))
    save_simulated(path, size, len(panels), lambda axes: draw_bars(axes, labels, panels, log=chart.log))
