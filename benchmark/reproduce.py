"""Re-run the experiments of the published sources in simulation, and hold every figure to the gate.

experiments.yaml has the experiments: a source's claim with the cases that try it, each of which is a load and
the engine to which it is offered. What the figures come to is written beside the tables in
docs/measured/reproduced.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmark import options as kinds
from benchmark.gate.gate import published, with_verdict
from benchmark.gate.recount import meets
from benchmark.options import Column, known_figure
from benchmark.processes import process_pool
from benchmark.simulate.deployment import SIMULATED, Deployment, place
from benchmark.workloads.synthetic import Draw, SyntheticLoad, draw_requests, lengths
from borders.files import whole_file
from continuous_batching.request import Request
from recipes.schema.reader import read
from serving.text.request_fields import parse_request

Result = dict[str, Any]
RECIPE = "recipes/bench/llama2_7b_cuda.yaml"  # Llama-2-7B has the shape of LLaMA-7B
KEYS = (  # Ascend 910 has no bfloat16; a prompt of 4,096 tokens needs room for its answer
    "model.dtype=float16",
    "device.graphs=0",
    "model.config.max_position_embeddings=8192",
    "scheduler.max_request_tokens=8192",
)
DEVICE, NUM_DEVICES = "ascend910", 8
OBJECTIVES_MS = {"ttft": 1000.0, "tpot": 50.0}  # Objectives of a good request
VOCAB_SIZE = 32_000
SIGMA = 0.8  # sigma of the logarithm of lengths: most are short, few are long
QUICK_REQUESTS, QUICK_SHORTER = 48, 8
FILE = Path(__file__).with_name("experiments.yaml")
COLUMNS = {  # figures that a table may have
    each.name: each
    for each in (
        Column("requests_per_s", "req/s", "{:,.2f}"),
        Column("output_tokens_per_s", "output tokens/s", "{:,.0f}"),
        Column("request_goodput", "good req/s", "{:,.2f}"),
        Column("ttft_ms.p50", "TTFT p50, ms", "{:,.0f}"),
        Column("ttft_ms.p99", "TTFT p99, ms", "{:,.0f}"),
        Column("tpot_ms.mean", "TPOT mean, ms", "{:,.1f}"),
        Column("itl_ms.p99", "ITL p99, ms", "{:,.1f}"),
        Column("itl_ms.max", "ITL max, ms", "{:,.1f}"),
        Column("mean_batch", "mean batch", "{:,.1f}"),
        Column("mean_page_use", "pages in use, share", "{:,.4f}"),
        Column("copied_pages", "pages moved", "{:,.0f}"),
    )
}
HEAD = """# The sources' experiments, re-run

This page answers: what the sources' experiments come to when the real scheduler runs them, beside each claim.

**SIMULATED, not measured.** The scheduler ran against a virtual clock, and the time of a step is the roofline
of a device that is not here. Trust ratios and orders of magnitude, not the second digit.

Device profile `{device}`: {costs}.

This command gives the same tables again:

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
        return [parse_request(line, None) for line in draw_requests(load, self.requests)]

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
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a source: its claim in words, and those of the source's rows that the gate audits."""

    name: str
    title: str
    claim: str
    columns: Sequence[Column]
    cases: Sequence[Case]
    claimed: Sequence[str] = ()

    def quick(self) -> Experiment:
        """Return the experiment with little load."""
        return replace(self, cases=[replace(case, offered=case.offered.quick()) for case in self.cases])


def experiments() -> list[Experiment]:
    """Return all experiments, in the order of their file."""
    stated = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    loads = {name: Offered(**fields) for name, fields in stated["loads"].items()}

    def cases(
        name: str, load: str, scheduler: str, rates: Sequence[float] = (), compact_every_steps: int = 0
    ) -> Iterator[Case]:
        keys = [f"scheduler.{key}={value}" for key, value in stated["schedulers"][scheduler].items()]
        keys.append(f"cache.compact_every_steps={compact_every_steps}")
        for rate in rates:
            label = f"{name}, {'all at once' if rate == math.inf else f'{rate:g}/s'}"
            yield Case(label, replace(loads[load], rate_per_s=rate), tuple(keys))
        if not rates:
            yield Case(name, loads[load], tuple(keys))

    return [
        Experiment(
            **fields
            | {
                "columns": [COLUMNS[each] for each in fields["columns"]],
                "cases": [case for each in fields["cases"] for case in cases(**each)],
            }
        )
        for fields in stated["experiments"]
    ]


def run(case: Case) -> Result:
    """Return the figures of one case, with their verdict and their records."""
    overrides = [*KEYS, *case.keys]
    deployment = Deployment(place(read(RECIPE, overrides, None).recipe, DEVICE, NUM_DEVICES))
    totals, own = deployment.serve(case.offered.trace(), None, records=True)
    figures, records = deployment.figures(totals, own), totals.records or []
    figures["itl_ms"]["max"] = round(1e3 * totals.itl.most_s, 3)
    good = sum(meets(each, OBJECTIVES_MS) for each in records)
    return with_verdict(
        {
            "SIMULATED": SIMULATED,
            "case": case.label,
            "recipe": RECIPE,
            "overrides": overrides,
            **figures,
            "goodput": OBJECTIVES_MS,
            "request_goodput": round(good / figures["duration_s"], 4),
            "records": records,
        }
    )


def run_all(cases: Iterable[Case], jobs: int) -> dict[Case, Result]:
    """Run each case once, in several processes; the results do not depend on the order in which they end."""
    work = {case: case.offered.requests * case.offered.answer_tokens for case in cases}
    found: dict[Case, Result] = {}
    with process_pool(jobs) as pool:
        futures = {pool.submit(run, case): case for case in sorted(work, key=work.__getitem__, reverse=True)}
        for number, future in enumerate(as_completed(futures), 1):
            case, result = futures[future], future.result()
            found[case] = {name: value for name, value in result.items() if name != "records"}
            print(f"{number}/{len(work)}  {result['verdict']['outcome']:8} {case.label}", flush=True)
    return found


def reproduce(
    chosen: Sequence[Experiment], command: str, output: Path, jobs: int, figures: Path | None
) -> tuple[int, int, Path]:
    """Run experiments, and write their tables into a folder, and `figures` as JSON.

    Returns the number of cases, the number that the gate refused, and the path of the tables.
    """
    output.mkdir(parents=True, exist_ok=True)
    if figures is not None:
        kinds.file(figures)  # checked before the runs; it may be in that folder
    found = run_all([case for each in chosen for case in each.cases], jobs)
    if figures is not None:
        by_name = {each.name: {case.label: found[case] for case in each.cases} for each in chosen}
        with whole_file(figures) as file:
            json.dump(by_name, file, indent=1)
    path, any_result = output / "reproduced.md", next(iter(found.values()))
    num_passed = sum(each["verdict"]["outcome"] == "pass" for each in found.values())
    head = HEAD.format(
        device=any_result["device_profile"], costs=any_result["costs"], command=command, recipe=RECIPE,
        keys=" ".join(KEYS), **OBJECTIVES_MS, num_passed=num_passed, num_results=len(found),
    )  # fmt: skip
    with whole_file(path) as file:
        file.write("\n".join([head, *("\n".join(_section(each, found)) for each in chosen)]))
    return len(found), len(found) - num_passed, path


def _section(experiment: Experiment, results: dict[Case, Result]) -> Iterator[str]:
    columns = experiment.columns
    yield f"## {experiment.title}\n"
    yield f"Claim: {experiment.claim}\n"
    yield f"| | {' | '.join(column.heading for column in columns)} | verdict |"
    yield "|---|" + "---:|" * len(columns) + "---|"
    for case in experiment.cases:
        result = results[case]
        cells = [column.cell(result) for column in columns]
        outcome, broken = (result["verdict"][part] for part in ("outcome", "refused"))
        yield f"| {case.label} | {' | '.join(cells)} | {outcome}{': ' * bool(broken)}{', '.join(broken)} |"
    audited = {row.name: row for row in published()}
    for name in experiment.claimed:
        claimed = audited[name]
        # The source names the mean batch otherwise.
        stated = dict(claimed.result) | {"mean_batch": claimed.result.get("mean_running")}
        values = [known_figure(stated, column.name) for column in columns]
        broken = ", ".join(claimed.verdict["refused"])
        cells = ["" if value is None else f"{value:,g}" for value in values]
        yield f"| *claimed: {name}* | {' | '.join(cells)} | refused: {broken} |"
    yield ""
