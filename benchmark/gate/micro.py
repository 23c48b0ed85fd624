"""Define the laws of the small benchmarks: steps on host and device, pages, simulation, speculation, stalls.

Each has figures of its own, computed from a few others beside them, and everything that was timed took no
longer than the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, finite, first

ROUNDED = 0.006  # tolerance of ratios of figures with two or four decimals
TIMES_SLACK_US = 0.06
STEPS_OF_A_RUN = 100  # more steps than proposers skip between two looks at many rows
Row = Mapping[str, Any]


def rows_of(figures: Figures, name: str) -> list[tuple[str, Row]]:
    """Return the named rows of a table, or the runs of an object; raises NotCheckable for none."""
    stated = figures.raw(name)
    if isinstance(stated, Mapping):
        found = [(f"{name}.{each}", row) for each, row in stated.items()]
    elif isinstance(stated, list):
        found = [(f"{name}[{number}]", row) for number, row in enumerate(stated)]
    else:
        raise NotCheckable(f"{name} is absent")
    if not found or not all(isinstance(row, Mapping) for _, row in found):
        raise ValueError(f"{name} must have rows of named figures")
    return found


def number(name: str, row: Row, part: str) -> float:
    """Return a figure of a row, 0 or above; raises ValueError for anything else."""
    if (value := finite(f"{name}.{part}", row.get(part))) < 0:
        raise ValueError(f"{name}.{part} is {value:g}, below 0")
    return value


def above_zero(name: str, row: Row, part: str) -> float:
    """Return a figure of a row that others are divided by; raises ValueError if it is absent or 0."""
    if not (value := number(name, row, part)):
        raise ValueError(f"{name}.{part} is 0; it must be above 0")
    return value


def part_of(name: str, row: Row, part: str) -> Any:
    """Return the value under a name of a row, of any type; raises ValueError if it is absent."""
    if row.get(part) is None:
        raise ValueError(f"{name}.{part} is absent")
    return row[part]


def ratio(name: str, row: Row, stated: str, part: str, whole: str, times: float = 1.0) -> str | None:
    """Return what is wrong with a figure that is one other over another."""
    below = number(name, row, whole)
    expected = times * number(name, row, part) / below if below else 0.0
    slack = ROUNDED * expected + 6e-4
    return differs(f"{name}.{stated}", number(name, row, stated), f"{part} / {whole}", expected, slack)


def within_the_run(figures: Figures, taken_s: float) -> str | None:
    """Check that what was timed took no longer than the whole run."""
    whole_s = figures.number("clock.monotonic_s")
    return exceeds("all that was timed, in s,", taken_s, "clock.monotonic_s", whole_s, 1e-3)


def median_of_runs(times: NDArray[np.float64]) -> float:
    """Return the median over means of `STEPS_OF_A_RUN` steps each, or over single steps if fewer exist."""
    runs = times[: len(times) // STEPS_OF_A_RUN * STEPS_OF_A_RUN].reshape(-1, STEPS_OF_A_RUN)
    return float(np.median(runs.mean(axis=1) if len(runs) else times))


def _percentiles(name: str, row: Row) -> Iterator[str | None]:
    """Check the percentiles and means of all steps' times."""
    times = row.get("times_us")
    if not isinstance(times, list) or not times:
        raise NotCheckable(f"{name}.times_us is absent")
    values = np.array([finite(f"a time of {name}", each) for each in times])
    expected = {
        "p50_us": np.percentile(values, 50),
        "p99_us": np.percentile(values, 99),
        "mean_us": values.mean(),
        "runs_us": median_of_runs(values),
    }
    for part, value in expected.items():
        if part in row:
            slack = TIMES_SLACK_US + 1e-4 * float(value)
            yield differs(f"{name}.{part}", number(name, row, part), "that of times_us", float(value), slack)
    if values.min() <= 0:
        yield f"a time of {name} is {values.min():g} us; it must be above 0"


def host(figures: Figures) -> str | None:
    """Check that percentiles are those of the steps, which took no longer than the run."""
    taken_us, wrongs = 0.0, []
    if figures.raw("waiting") is not None:
        for name, table in (figures.raw("slots") or {}).items():
            base_us = above_zero(f"slots.{name}", table[0], "mean_us")
            for row in table:
                where = f"slots.{name}, {row.get('variant')}"
                wrongs += list(_percentiles(where, row))
                mean_us = above_zero(where, row, "mean_us")
                times, stated = mean_us / base_us, number(where, row, "times_the_first")
                slack = ROUNDED + times * TIMES_SLACK_US * (1 / mean_us + 1 / base_us)
                wrongs.append(
                    differs(f"{where}: times_the_first", stated, "mean / the first's", times, slack)
                )
                taken_us += sum(part_of(where, row, "times_us"))
    else:
        for name, row in rows_of(figures, "host"):
            for part, measured in row.items():
                if isinstance(measured, Mapping):
                    wrongs += list(_percentiles(f"{name}.{part}", measured))
                    taken_us += sum(part_of(name, measured, "times_us"))
    return first([*wrongs, within_the_run(figures, taken_us / 1e6)])


def speculation(figures: Figures) -> str | None:
    """Check that rates are medians of tokens over seconds, and gains are relative to plain decoding."""
    wrongs, taken_s, plain = [], 0.0, dict[tuple[str, int], tuple[float, float]]()
    for name, row in rows_of(figures, "rows"):
        times = [finite(f"a time of {name}", each) for each in part_of(name, row, "window_s")]
        tokens = [finite(f"tokens of {name}", each) for each in part_of(name, row, "window_tokens")]
        if not times or min(times) <= 0 or len(tokens) != len(times):
            return f"{name}.window_s must be times above 0, one for each of window_tokens"
        taken_s += sum(times)
        load = (str(row.get("text")), int(number(name, row, "slots")))
        rate = float(np.median(np.divide(tokens, times)))
        slack = 0.006 + rate * 6e-5 / min(times)  # rounding of the times and of the rate
        stated = number(name, row, "tokens_per_s")
        wrongs.append(differs(f"{name}.tokens_per_s", stated, "median of tokens / time", rate, slack))
        if row.get("kind") == "plain":
            plain[load] = rate, slack
        if load not in plain:
            return f"{name} has no plain decoding before it"
        base, base_slack = plain[load]
        slack = 6e-5 + rate / base * (slack / rate + base_slack / base)
        stated = number(name, row, "times_plain")
        wrongs.append(differs(f"{name}.times_plain", stated, "over plain's tokens_per_s", rate / base, slack))
        drafted, accepted = number(name, row, "drafted"), number(name, row, "accepted")
        wrongs.append(exceeds(f"{name}.accepted", accepted, "drafted", drafted, 0.0))
        wrongs.append(exceeds(f"{name}.accepted", accepted, "tokens", sum(tokens), 0.0))
    return first([*wrongs, within_the_run(figures, taken_s)])


def tokens_of(load: str) -> float:
    """Return the tokens of a load, as its name says: a decode has one."""
    decodes = re.search(r"(\d+) decodes? ", load)
    prompts = re.search(r"(\d+) prompts? of ([\d,]+)", load)
    count = float(decodes[1]) if decodes else 0.0
    return count + (float(prompts[1]) * float(prompts[2].replace(",", "")) if prompts else 0.0)


def device(figures: Figures) -> str | None:
    """Check that shares are floors over step times, and that no step is faster than its reads."""
    wrongs: list[str | None] = []
    taken_ms = 0.0
    for name, row in rows_of(figures, "steps"):
        if "not_measured" in row:
            continue
        taken_ms += number(name, row, "step_ms")
        if row.get("is_mixed"):
            parts = sum(finite(f"{name}.parts_ms", each) for each in part_of(name, row, "parts_ms"))
            times = number(name, row, "step_ms") / parts if parts else 0.0
            stated = number(name, row, "over_sum_of_parts")
            wrongs.append(
                differs(f"{name}.over_sum_of_parts", stated, "step / parts", times, ROUNDED * times)
            )
            continue
        wrongs += [
            ratio(name, row, "share_of_copy_rate", "read_floor_ms", "step_ms"),
            ratio(name, row, "share_of_product_rate", "product_floor_ms", "step_ms"),
            exceeds(
                f"{name}.attention_ms",
                number(name, row, "attention_ms"),
                "step_ms",
                number(name, row, "step_ms"),
                number(name, row, "step_ms"),
            ),
        ]
        tokens, rate = tokens_of(str(row.get("load"))), number(name, row, "tokens_per_s")
        if tokens:
            per_s = tokens / (above_zero(name, row, "step_ms") / 1e3)
            wrongs.append(
                differs(f"{name}.tokens_per_s", rate, "tokens / step_ms", per_s, ROUNDED * per_s + 0.1)
            )
    if not wrongs:
        raise NotCheckable("nothing was measured")
    return first([*wrongs, within_the_run(figures, taken_ms / 1e3)])


def pages(figures: Figures) -> str | None:
    """Check the shares of a plain copy's rate, and the figures of pages and prefixes."""
    wrongs: list[str | None] = []
    for name, row in rows_of(figures, "copies"):
        for part in ("compact", "swap_out", "swap_in"):
            plain, paged = number(name, row, "plain_gb_per_s"), number(name, row, f"{part}_gb_per_s")
            share = number(name, row, f"{part}_share")
            slack = 0.06 * (1 + share) / max(plain, 0.1) + 6e-4  # rates have one decimal
            wrongs.append(
                differs(f"{name}.{part}_share", share, "rate / plain rate", paged / max(plain, 0.1), slack)
            )
    unused = [(row, number(name, row, "unused_share")) for name, row in rows_of(figures, "unused_places")]
    wrongs += [exceeds("unused_share", share, "the whole", 1.0, 0) for _, share in unused]
    taken_us = 0.0
    for name, row in rows_of(figures, "prefix"):
        taken_us += sum(number(name, row, part) for part in ("lookup_us", "hash_us"))
        per_page = [number(name, row, f"{part}_us_per_page") for part in ("publish", "evict")]
        wrongs += [f"{name} has a time of 0" for each in per_page if each <= 0]
    return first([*wrongs, within_the_run(figures, taken_us / 1e6)])


def simulation(figures: Figures) -> str | None:
    """Check that rates are tokens over seconds, and that no run has more output tokens than spans."""
    wrongs: list[str | None] = []
    taken_s = 0.0
    for name, row in rows_of(figures, "simulation"):
        taken_s += number(name, row, "wall_s")
        for clock in ("wall", "cpu"):
            stated, seconds = (
                number(name, row, f"output_tokens_per_{clock}_s"),
                number(name, row, f"{clock}_s"),
            )
            tokens = number(name, row, "output_tokens")
            slack = ROUNDED * tokens + 0.006 * stated  # seconds have two decimals
            wrongs.append(
                differs(f"{name}: rate x {clock}_s", stated * seconds, "output_tokens", tokens, slack)
            )
        spans, tokens = (
            number(name, row, "steps") * number(name, row, "mean_batch"),
            number(name, row, "output_tokens"),
        )
        wrongs.append(
            exceeds(
                f"{name}.output_tokens",
                tokens,
                "steps x mean_batch",
                spans,
                0.06 * number(name, row, "steps"),
            )
        )
        wrongs.append(exceeds(f"{name}.requests", number(name, row, "requests"), "output_tokens", tokens, 0))
    return first([*wrongs, within_the_run(figures, taken_s)])


def stall(figures: Figures) -> str | None:
    """Check that the effect of chunks is the ratio of both ways' figures."""
    ways = {name: figures.raw(name) for name in ("whole", "chunked")}
    if not all(isinstance(row, Mapping) for row in ways.values()):
        raise NotCheckable("one of the two ways is absent")
    whole, chunked = ways["whole"], ways["chunked"]
    wrongs: list[str | None] = []
    for stated, part, (above, below), rounding in (
        ("worst_itl_times_lower", "worst_itl_ms", (whole, chunked), 0.005),
        ("throughput_times", "total_tokens_per_s", (chunked, whole), 0.00005),
    ):
        expected = number("one way", above, part) / above_zero("the other way", below, part)
        wrongs.append(differs(stated, figures.number(stated), f"{part} of both", expected, 1.01 * rounding))
    for name, row in ways.items():
        itl, worst = part_of(name, row, "itl_ms"), number(name, row, "worst_itl_ms")
        wrongs.append(
            exceeds(f"{name}.itl_ms.p99", finite("p99", itl.get("p99")), "worst_itl_ms", worst, 0.001)
        )
        wrongs += list(_order(f"{name}.itl_ms", itl))
        wrongs += list(
            _order(f"{name}.ttft_of_long_prompts_ms", part_of(name, row, "ttft_of_long_prompts_ms"))
        )
        seconds = number(name, row, "computed_tokens") / above_zero(name, row, "total_tokens_per_s")
        wrongs.append(within_the_run(figures, seconds))
    return first(wrongs)


def _order(name: str, row: Row) -> Iterator[str | None]:
    parts: Sequence[str] = [part for part in ("p50", "p90", "p99") if part in row]
    for low, high in pairwise(parts):
        yield exceeds(f"{name}.{low}", number(name, row, low), high, number(name, row, high), 0)


LAWS = {
    name: (Law(f"figures of {name}", statement, check),)
    for name, statement, check in (
        ("host", "percentiles are those of the steps, within the run", host),
        ("device", "shares and rates are of the step's time, within the run", device),
        ("kv", "shares are of a plain copy's rate, within the run", pages),
        ("simulation", "rates are tokens / seconds, within the run", simulation),
        ("speculation", "throughputs and their ratios are of the medians, within the run", speculation),
        ("stall", "what chunks change is the ratio of both ways", stall),
    )
}
