"""Re-run the experiments of the published sources in simulation, and hold every figure to the gate.

A case is a load, and the engine to which it is offered; an experiment is a source's claim with the cases that
try it. Rates are requests a second, lengths tokens, latencies milliseconds. What the figures come to is
written beside the tables in docs/measured/reproduced.md.
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
from numpy.typing import NDArray

from benchmark import options as kinds
from benchmark.gate.gate import published, with_verdict
from benchmark.options import Column, known_figure
from benchmark.processes import process_pool
from benchmark.simulate.deployment import SIMULATED, Deployment, place
from benchmark.workloads.synthetic import Draw, SyntheticLoad, draw_requests, lengths
from borders.files import whole_file
from continuous_batching.request import Request, SamplingParams
from recipes.schema.reader import read

Result = dict[str, Any]
RECIPE = "recipes/bench/llama2_7b_cuda.yaml"  # Llama-2-7B has the shape of LLaMA-7B
KEYS = (  # Ascend 910 has no bfloat16; a prompt of 4,096 tokens needs room for its answer
    "model.dtype=float16",
    "device.graphs=0",
    "model.config.max_position_embeddings=8192",
    "scheduler.max_request_tokens=8192",
)
DEVICE, NUM_DEVICES = "ascend910", 8
TTFT_MS, TPOT_MS = 1000.0, 50.0  # objectives of a good request
VOCAB_SIZE = 32_000
SIGMA = 0.8  # sigma of the logarithm of lengths: most are short, few are long
QUICK_REQUESTS, QUICK_SHORTER = 48, 8
WHOLE_TOKENS = 8192  # budget of a step that holds the longest prompt, and more
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
    keys: tuple[str, ...]

    def at(self, *rates_per_s: float) -> list[Case]:
        """Return the case at other rates."""
        return [
            replace(
                self,
                label=f"{self.label}, {'all at once' if rate == math.inf else f'{rate:g}/s'}",
                offered=replace(self.offered, rate_per_s=rate),
            )
            for rate in rates_per_s
        ]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a source: its claim in words, and those of the source's rows that the gate audits."""

    name: str
    title: str
    claim: str
    cases: Sequence[Case]
    columns: tuple[Column, ...]
    rows: tuple[str, ...] = ()

    def quick(self) -> Experiment:
        """Return the experiment with little load; of several rates only the least and the largest."""

        def series(case: Case) -> str:
            return case.label.partition(", ")[0]

        rates: dict[str, list[float]] = {series(case): [] for case in self.cases}
        for case in self.cases:
            rates[series(case)].append(case.offered.rate_per_s)
        kept = [
            replace(case, offered=case.offered.quick())
            for case in self.cases
            if case.offered.rate_per_s in (min(rates[series(case)]), max(rates[series(case)]))
        ]
        return replace(self, cases=kept)


def keys(policy: str, num_slots: int, max_batch_tokens: int, **more: object) -> tuple[str, ...]:
    """Return a scheduling as overrides of the recipe."""
    values = {"policy": policy, "num_slots": num_slots, "max_batch_tokens": max_batch_tokens, **more}
    return tuple(f"scheduler.{name}={value}" for name, value in values.items())


def static(batch_size: int) -> tuple[str, ...]:
    """Return the keys of FasterTransformer's batching; the first of a batch waits 100 ms for the others."""
    return keys("static", batch_size, WHOLE_TOKENS, batch_size=batch_size, max_wait_ms=100)


def chunked(tokens: int, num_slots: int = 64) -> tuple[str, ...]:
    """Return the keys of Sarathi's scheduling: decodes first, then chunks up to a step's budget."""
    return keys("stall_free", num_slots, tokens)


def whole(policy: str) -> tuple[str, ...]:
    """Return the keys for prompts in one step: `orca` beside the decodes, `prefill_first` in their place."""
    return keys(policy, 64, WHOLE_TOKENS)


WHOLE, TENTHS, HUNDREDTHS = "{:,.0f}", "{:,.1f}", "{:,.2f}"  # formats of figures
REQUESTS = Column("requests_per_s", "req/s", HUNDREDTHS)
OUTPUT = Column("output_tokens_per_s", "output tokens/s", WHOLE)
GOOD = Column("request_goodput", "good req/s", HUNDREDTHS)
TTFT = Column("ttft_ms.p50", "TTFT p50, ms", WHOLE)
TTFT_99 = Column("ttft_ms.p99", "TTFT p99, ms", WHOLE)
TPOT = Column("tpot_ms.mean", "TPOT mean, ms", TENTHS)
ITL_99 = Column("itl_ms.p99", "ITL p99, ms", TENTHS)
ITL_MAX = Column("itl_ms.max", "ITL max, ms", TENTHS)
BATCH = Column("mean_batch", "mean batch", TENTHS)
PAGES = Column("mean_page_use", "pages in use, share", "{:,.4f}")
COPIED = Column("copied_pages", "pages moved", WHOLE)

# The article's "mean seq=512" is read as prompt and answer together, bounded by its 2,048.
BATCH_LOAD = Offered(requests=960)
SHORT_LOAD = Offered(requests=240)  # the rate of batches of 8 does not depend on it
EVEN = Offered(384)  # prompts and answers of 512 together
LONG = Offered(  # answers of 512, to 2,048: the intro's "12 to 2,048"
    384, prompt_tokens=32, most_prompt_tokens=128, answer_tokens=512, most_answer_tokens=2048
)
STALLED = Offered(600, long_every=20, long_tokens=4096)
RISING = Offered(240, prompt_tokens=1024, most_prompt_tokens=4096)
COMPACTED = Offered(400, rate_per_s=12)
BATCHINGS = (
    Case("static 8", SHORT_LOAD, static(8)),
    Case("static 32", BATCH_LOAD, static(32)),
    Case("static 64", BATCH_LOAD, static(64)),
    Case("continuous 64", BATCH_LOAD, chunked(2048)),
    Case("continuous 256", BATCH_LOAD, chunked(2048, 256)),
)
PROMPTS = (
    Case("whole beside decodes", STALLED, whole("orca")),
    Case("whole while decodes wait", STALLED, whole("prefill_first")),
    *(Case(f"chunks of {tokens}", STALLED, chunked(tokens)) for tokens in (2048, 512, 128)),
)
SCHEDULERS = (
    Case("FasterTransformer", RISING, static(64)),
    Case("Orca", RISING, whole("orca")),
    Case("vLLM before chunks", RISING, whole("prefill_first")),
    Case("Sarathi", RISING, chunked(512)),
)
EXPERIMENTS = (
    Experiment(
        "static_continuous",
        "Static and continuous batching, LLaMA-7B on 8 x Ascend 910",
        "at 50 requests/s, 44.2 req/s and a TPOT of 4,890 ms in static batches of 64; 482 req/s and 187 ms"
        " continuously, in a mean batch of 53.2: 10.9 times the throughput, a 26th of the TPOT.",
        [case for rate in (50.0, math.inf) for each in BATCHINGS for case in each.at(rate)],
        (REQUESTS, OUTPUT, TPOT, TTFT, BATCH, PAGES),
        ("static, batch 8", "static, batch 32", "static, batch 64", "continuous"),
    ),
    Experiment(
        "goodput",
        "Continuous against static batching in goodput",
        "10.9 times, of throughput. Here the same engine of 64 slots, the same trace and the same"
        " objectives, at several loads; `even` has 256 tokens in prompt and in answer on average, `long`"
        " answers of 512, to 2,048.",
        [
            case
            for name, load, rates in (("even", EVEN, (2.0, 4.0, 8.0, 50.0)), ("long", LONG, (2.0, 4.0, 50.0)))
            for engine, way in (("static", static(64)), ("continuous", chunked(2048)))
            for case in Case(f"{engine} {name}", load, way).at(*rates)
        ],
        (REQUESTS, GOOD, TTFT, TTFT_99, TPOT, BATCH),
    ),
    Experiment(
        "whole_chunked",
        "Whole and chunked prompts",
        "a prompt of 4,096 tokens takes 4 s, and the TPOT is 4,187 ms; in chunks of 512 it is 204 ms, a"
        " 20th, for 3 % of the throughput. Here every 20th prompt has 4,096 tokens.",
        [case for rate in (8.0, math.inf) for each in PROMPTS for case in each.at(rate)],
        (REQUESTS, TPOT, ITL_99, ITL_MAX, TTFT, TTFT_99),
        ("whole prefill", "chunked prefill", "whole prefill's stall", "a prompt in 8 chunks"),
    ),
    Experiment(
        "capacity",
        "Four schedulers at increasing load",
        "prompts first stalls the decodes, FasterTransformer's way stalls the prompts, Orca's long prompts"
        " delay the decodes beside them; Sarathi's decodes are hardly delayed (Sarathi article; its figures"
        " are pictures). Here static batches of 64, whole prompts beside decodes, prompts first, and chunks"
        " of 512; prompts of 1,024 tokens on average, to 4,096.",
        [case for each in SCHEDULERS for case in each.at(2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)],
        (REQUESTS, ITL_99, ITL_MAX, TTFT, TPOT, BATCH),
    ),
    Experiment(
        "compaction",
        "The cost of compaction",
        "32,768 pages are 8.5 GB, moved in about 10 ms every 1,000 steps: 0.001 % (CANN article).",
        [
            Case(name, COMPACTED, (*chunked(1024), f"cache.compact_every_steps={steps}"))
            for name, steps in (
                ("never", 0), ("every 1,000 steps", 1000), ("every 100 steps", 100), ("every 10 steps", 10)
            )
        ],
        (REQUESTS, COPIED, TPOT, ITL_99, ITL_MAX),
        ("bytes that compaction moves", "share of compaction", "time of compaction"),
    ),
)  # fmt: skip


def run(case: Case) -> Result:
    """Return the figures of one case, with their verdict and their records."""
    overrides = [*KEYS, *case.keys]
    deployment = Deployment(place(read(RECIPE, overrides, None).recipe, DEVICE, NUM_DEVICES))
    totals, own = deployment.serve(case.offered.trace(), None, records=True)
    figures, records = deployment.figures(totals, own), totals.records or []
    figures["itl_ms"]["max"] = round(1e3 * totals.itl.most_s, 3)
    good = sum(map(is_good, records))
    return with_verdict(
        {
            "SIMULATED": SIMULATED,
            "case": case.label,
            "recipe": RECIPE,
            "overrides": overrides,
            **figures,
            "goodput": {"ttft": TTFT_MS, "tpot": TPOT_MS},
            "request_goodput": round(good / figures["duration_s"], 4),
            "records": records,
        }
    )


def is_good(record: Result) -> bool:
    """Return whether a request met both objectives; its TPOT is the mean gap of its answer."""
    first_s, gaps = record["first_token_s"], max(1, record["output_tokens"] - 1)
    is_soon: bool = 1e3 * (first_s - record["arrival_s"]) <= TTFT_MS
    return is_soon and 1e3 * (record["finish_s"] - first_s) / gaps <= TPOT_MS


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
        keys=" ".join(KEYS), ttft=TTFT_MS, tpot=TPOT_MS, num_passed=num_passed, num_results=len(found),
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
    for name in experiment.rows:
        claimed = audited[name]
        # The source names the mean batch otherwise.
        stated = dict(claimed.result) | {"mean_batch": claimed.result.get("mean_running")}
        values = [known_figure(stated, column.name) for column in columns]
        broken = ", ".join(each.law.name for each in claimed.verdict.of("refused"))
        cells = ["" if value is None else f"{value:,g}" for value in values]
        yield f"| *claimed: {name}* | {' | '.join(cells)} | refused: {broken} |"
    yield ""
