"""Define an experiment before it is run: its claim, cases, table and chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.reproduce.case import Case
from benchmark.reproduce.case_runs import Results


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
                kept.append(case.quick())
        return Experiment(
            self.name,
            self.title,
            self.claim,
            tuple(kept),
            self.columns,
            self.chart,
            self.findings,
            self.rows,
        )


def figure(result: Mapping[str, Any], name: str) -> float:
    """Return a figure by its dotted name."""
    value: Any = result
    for part in name.split("."):
        value = value[part]
    return float(value)


REQUESTS = Column("requests_per_s", "req/s", 2)
OUTPUT = Column("output_tokens_per_s", "output tokens/s", 0)
GOOD = Column("request_goodput", "good req/s", 2)
TTFT = Column("ttft_ms.p50", "TTFT p50, ms", 0)
TTFT_99 = Column("ttft_ms.p99", "TTFT p99, ms", 0)
TPOT = Column("tpot_ms.mean", "TPOT mean, ms")
ITL_99 = Column("itl_ms.p99", "ITL p99, ms")
ITL_MAX = Column("itl_ms.max", "ITL max, ms")
E2E = Column("e2e_ms.p50", "E2E p50, ms", 0)
BATCH = Column("mean_batch", "mean batch")
PAGES = Column("mean_page_use", "pages in use, share", 4)
HITS = Column("prefix_hit_rate", "prompt tokens found cached", 3)
PREEMPTIONS = Column("preemptions", "preemptions", 0)
BUSY = Column("busy_share", "share of time busy", 3)
