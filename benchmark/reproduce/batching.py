"""Reproduce the experiments on continuous batching, where requests join and leave a running batch."""

from __future__ import annotations

import math

from benchmark.reproduce.case import Case, Offered, chunked, static, whole
from benchmark.reproduce.case_runs import Result, Results
from benchmark.reproduce.experiment import (
    BATCH,
    E2E,
    GOOD,
    ITL_99,
    OUTPUT,
    PAGES,
    REQUESTS,
    TPOT,
    TTFT,
    Chart,
    Experiment,
    figure,
)

# The article's "mean seq=512" is read as prompt and answer together, bounded by its 2,048.
LOAD = Offered(requests=960)
SHORT = Offered(requests=240)  # load for batches of 8, whose rate does not depend on the number of requests
RISING = Offered(requests=320)
CLAIMED_X, CLAIMED_TPOT_S, OFFERED_X = 482.0, 0.187, 50.0
RATES = (2.0, 4.0, 8.0, 12.0, 16.0)


def static_continuous() -> Experiment:
    """Return the experiment of the article's table."""
    engines = (
        Case("static 8", SHORT, static(8)),
        Case("static 32", LOAD, static(32)),
        Case("static 64", LOAD, static(64)),
        Case("continuous 64", LOAD, chunked(2048)),
        Case("continuous 256", LOAD, chunked(2048, 256)),
    )
    return Experiment(
        "static_continuous",
        "Static and continuous batching, LLaMA-7B on 8 x Ascend 910",
        "at 50 requests/s, 44.2 req/s and a TPOT of 4,890 ms in static batches of 64; 482 req/s and 187 ms"
        " continuously, in a mean batch of 53.2: 10.9 times the throughput, a 26th of the TPOT.",
        tuple(each.at(rate) for rate in (OFFERED_X, math.inf) for each in engines),
        (REQUESTS, OUTPUT, TPOT, TTFT, BATCH, PAGES),
        Chart((REQUESTS, TPOT)),
        _static_continuous,
        ("static, batch 8", "static, batch 32", "static, batch 64", "continuous"),
    )


def _static_continuous(results: Results) -> list[str]:
    at_once = {name: result for name, result in results.items() if name.endswith("all at once")}
    static_64, ours = at_once["static 64, all at once"], at_once["continuous 64, all at once"]
    times = ratio(ours, static_64, "requests_per_s")
    gaps = answer_tokens(ours) - 1
    needed = CLAIMED_X * CLAIMED_TPOT_S * gaps
    floor_ms = (
        figure(ours, "weight_bytes_per_step") / (figure(ours, "num_devices") * 1200e9) * 1e3
    )  # time at the profile's whole bandwidth
    return [
        f"Throughput at saturation is {times:.2f} times that of static batches of 64, not 10.9:"
        f" {_bound(ours, static_64)}",
        f"482 req/s cannot be served of {OFFERED_X:g} that arrive.",
        f"By Little's law 482 req/s at a TPOT of 187 ms and {gaps:.0f} gaps an answer hold {needed:,.0f}"
        " requests at once; the table has a mean batch of 53.2. At most 64 of them in steps of"
        f" {figure(ours, 'itl_ms.mean'):.1f} ms give {figure(ours, 'requests_per_s'):.1f} req/s here.",
        "Static batching does not raise the TPOT, because its steps are shorter"
        f" ({figure(static_64, 'tpot_ms.mean'):.1f} ms) than those that also compute prompts"
        f" ({figure(ours, 'tpot_ms.mean'):.1f} ms); it raises the wait before the first token:"
        f" {figure(static_64, 'ttft_ms.p50') / 1e3:.0f} s against {figure(ours, 'ttft_ms.p50') / 1e3:.0f} s."
        f" A step reads {figure(ours, 'weight_bytes_per_step') / 1e9:.1f} GB of weights on 8 devices,"
        f" {floor_ms:.1f} ms at 1.2 TB/s each, not 4,890 ms.",
    ]


def _bound(ours: Result, static_64: Result) -> str:
    """Explain the ratio: how many rows are full, and what a full step costs."""
    fill = ratio(ours, static_64, "mean_batch")
    slower = (figure(ours, "duration_s") / figure(ours, "steps")) / (
        figure(static_64, "duration_s") / figure(static_64, "steps")
    )
    most = static_64["most_output_tokens"] / answer_tokens(static_64)
    return (
        f"a step has {fill:.2f} times the rows ({figure(ours, 'mean_batch'):.1f} against"
        f" {figure(static_64, 'mean_batch'):.1f}) and takes {slower:.2f} times as long. The ratio is at most"
        f" longest / mean answer, {most:.2f} here and 2,048 / 512 = 4 in the article."
    )


def orca_static() -> Experiment:
    """Return the experiment on Orca: finished requests leave at once, and late ones join at the next step."""
    engines = (Case("static 64", RISING, static(64)), Case("orca", RISING, whole("orca")))
    return Experiment(
        "orca_static",
        "Orca and FasterTransformer's way",
        "requests that are done leave at once, and late ones join at the next iteration (Orca's note, and"
        " the Sarathi article on FasterTransformer: prompts stall, throughput is low); no figure is given.",
        tuple(each.at(rate) for each in engines for rate in RATES),
        (REQUESTS, GOOD, TTFT, TPOT, ITL_99, E2E, BATCH),
        Chart((REQUESTS, TTFT, E2E), over_rate=True),
        _orca_static,
    )


def _orca_static(results: Results) -> list[str]:
    rates = [each.partition(", ")[2] for each in results if each.startswith("orca")]
    low, high = rates[0], rates[-1]
    sentences = [
        f"at {rate} the median answer is complete after"
        f" {figure(results[f'orca, {rate}'], 'e2e_ms.p50') / 1e3:.1f} s under Orca,"
        f" {figure(results[f'static 64, {rate}'], 'e2e_ms.p50') / 1e3:.1f} s in static batches"
        for rate in (low, high)
    ]
    sooner = [
        figure(results[f"orca, {rate}"], "e2e_ms.p50") < figure(results[f"static 64, {rate}"], "e2e_ms.p50")
        for rate in rates
    ]
    verdict = "holds" if all(sooner) else "does not hold at every rate"
    return [
        f"The claim {verdict}: {'; '.join(sentences)}. The difference is waiting for a batch to fill and"
        " end.",
        "Orca's steps hold whole prompts, so that its ITL p99 is higher.",
    ]


def ratio(one: Result, other: Result, name: str) -> float:
    """Return how many times as large the first figure is as the other."""
    return figure(one, name) / figure(other, name)


def answer_tokens(result: Result) -> float:
    """Return the mean length of an answer."""
    return figure(result, "output_tokens") / figure(result, "completed")


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [static_continuous(), orca_static()]
