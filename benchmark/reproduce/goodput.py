"""Reproduce the experiment on how many times more requests continuous batching serves within objectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmark.reproduce.batching import ratio
from benchmark.reproduce.case import Case, Offered, chunked, static
from benchmark.reproduce.case_runs import OBJECTIVES, Result, Results, num_good
from benchmark.reproduce.experiment import (
    BATCH,
    GOOD,
    REQUESTS,
    TPOT,
    TTFT,
    TTFT_99,
    Chart,
    Experiment,
    figure,
)

CLAIMED = 10.9
NUM_REQUESTS = 384
EVEN = Offered(NUM_REQUESTS)  # prompts and answers of 512 together
LONG = Offered(  # answers of 512, to 2,048: the intro's "12 to 2,048"
    NUM_REQUESTS, prompt_tokens=32, most_prompt_tokens=128, answer_tokens=512, most_answer_tokens=2048
)
RATES = {"even": (2.0, 4.0, 8.0, 50.0), "long": (2.0, 4.0, 50.0)}
TTFTS_MS = (250.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0)
TPOTS_MS = (15.0, 20.0, 50.0, 187.0)
LEAST_SHARE = 0.01  # share of all requests that static batching must serve well; a ratio over fewer is chance
KEEPS_UP = 0.8  # least share of the offered rate that is served by an engine that keeps up


@dataclass(frozen=True, slots=True)
class GoodputRatio:
    """The ratio of both engines' goodput under objectives, in milliseconds."""

    times: float
    at: str
    ttft_ms: float
    tpot_ms: float
    keeps_up: bool  # static batching serves the offered rate

    def __str__(self) -> str:
        return f"{self.times:.1f} times ({self.at}, TTFT {self.ttft_ms:g} ms, TPOT {self.tpot_ms:g} ms)"


def found(results: Results) -> Iterator[GoodputRatio]:
    """Yield the ratios of loads and objectives under which static batching serves enough requests well."""
    for name, ours in results.items():
        if not name.startswith("continuous"):
            continue
        at = name.removeprefix("continuous ")
        theirs = results[f"static {at}"]
        keeps_up = served_share(theirs) >= KEEPS_UP
        for ttft in TTFTS_MS:
            for tpot in TPOTS_MS:
                good, least = (num_good(each["records"], ttft, tpot) for each in (ours, theirs))
                if least >= max(1, LEAST_SHARE * theirs["requests"]):
                    times = (good / ours["duration_s"]) / (least / theirs["duration_s"])
                    yield GoodputRatio(times, at, ttft, tpot, keeps_up)


def served_share(result: Result) -> float:
    """Return the share of the offered rate that was served."""
    return figure(result, "requests_per_s") / figure(result, "offered_per_s")


def goodput() -> Experiment:
    """Return the search for the largest ratio in the article's setting."""
    cases = [
        Case(f"{engine} {reading}", load, way).at(rate)
        for reading, load in (("even", EVEN), ("long", LONG))
        for engine, way in (("static", static(64)), ("continuous", chunked(2048)))
        for rate in RATES[reading]
    ]
    return Experiment(
        "goodput",
        "Continuous against static batching in goodput",
        f"{CLAIMED} times, of throughput. Here the same engine of 64 slots, the same trace and the same"
        " objectives, at several loads; `even` has 256 tokens in prompt and in answer on average, `long`"
        " answers of 512, to 2,048.",
        tuple(cases),
        (REQUESTS, GOOD, TTFT, TTFT_99, TPOT, BATCH),
        Chart((GOOD, TTFT, TPOT), over_rate=True, log=True),
        _goodput,
    )


def _goodput(results: Results) -> list[str]:
    tried = list(found(results))
    steady = [each for each in tried if each.keeps_up]
    sentences = [_throughput(results)]
    if tried:
        best = max(tried, key=lambda each: each.times)
        num = sum(each.times >= CLAIMED for each in tried)
        sentences.append(
            f"Goodput: the largest ratio of {len(tried)} pairs of load and objectives is {best}; {num} of"
            f" them reach {CLAIMED}. Pairs under which static batches serve less than {LEAST_SHARE:.0%} of"
            " the requests well are left out."
        )
    if steady:
        best = max(steady, key=lambda each: each.times)
        sentences.append(f"Where static batching keeps up with what is offered, the largest is {best}.")
    sentences.append(_reason(results))
    return sentences


def _throughput(results: Results) -> str:
    times = {
        name.removeprefix("continuous "): ratio(
            each, results[name.replace("continuous", "static")], "requests_per_s"
        )
        for name, each in results.items()
        if name.startswith("continuous")
    }
    at = max(times, key=lambda name: times[name])
    theirs = results[f"static {at}"]
    bound = theirs["most_output_tokens"] / (theirs["output_tokens"] / theirs["completed"])
    return (
        f"Throughput: the largest ratio is {times[at]:.2f} ({at}); longest / mean answer bounds it by"
        f" {bound:.2f} here, so that {CLAIMED} is not possible."
    )


def _reason(results: Results) -> str:
    """Explain where the ratio of goodput comes from."""
    low = next(each for name, each in results.items() if name.startswith("static"))
    batch_s = figure(low, "most_output_tokens") * figure(low, "itl_ms.mean") / 1e3
    return (
        f"A static batch runs for up to {batch_s:.0f} s, and requests that arrive meanwhile wait for its"
        " end. With an objective for the first token far below that, the ratio grows without bound as the"
        f" objective falls or the queue grows. The table has both goodputs at {OBJECTIVES['ttft']:g} and"
        f" {OBJECTIVES['tpot']:g} ms."
    )


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [goodput()]
