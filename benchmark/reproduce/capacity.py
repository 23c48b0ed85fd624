"""Reproduce the experiment on how much load each scheduler bears before its answers stall."""

from __future__ import annotations

from benchmark.reproduce.case import Case, Offered, chunked, static, whole
from benchmark.reproduce.case_runs import Results
from benchmark.reproduce.experiment import (
    BATCH,
    ITL_99,
    ITL_MAX,
    REQUESTS,
    TPOT,
    TTFT,
    Chart,
    Experiment,
    figure,
)

LOAD = Offered(240, prompt_tokens=1024, most_prompt_tokens=4096)
RATES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
STRICT_MS, RELAXED_MS, MEDIAN_TTFT_MS = 50.0, 150.0, 2000.0
ENGINES = (
    Case("FasterTransformer", LOAD, static(64)),
    Case("Orca", LOAD, whole("orca")),
    Case("vLLM before chunks", LOAD, whole("prefill_first")),
    Case("Sarathi", LOAD, chunked(512)),
)


def capacity() -> Experiment:
    """Return the experiment on the article's four schedulers at increasing load."""
    return Experiment(
        "capacity",
        "Four schedulers at increasing load",
        "prompts first stalls the decodes, FasterTransformer's way stalls the prompts, Orca's long prompts"
        " delay the decodes beside them; Sarathi's decodes are hardly delayed (Sarathi article; its figures"
        " are pictures). Here static batches of 64, whole prompts beside decodes, prompts first, and chunks"
        " of 512; prompts of 1,024 tokens on average, to 4,096.",
        tuple(engine.at(rate) for engine in ENGINES for rate in RATES),
        (REQUESTS, ITL_99, ITL_MAX, TTFT, TPOT, BATCH),
        Chart((ITL_99, TTFT), over_rate=True, log=True),
        _capacity,
    )


def bears(results: Results, series: str, itl_ms: float) -> float:
    """Return the highest rate, from the least upwards, that meets the objectives; 0 if none does.

    The ITL p99 has to be within `itl_ms`, and the median time to the first token within 2 s, as in the paper.
    """
    most = 0.0
    for name, result in results.items():
        if name.partition(", ")[0] != series:
            continue
        if figure(result, "itl_ms.p99") > itl_ms or figure(result, "ttft_ms.p50") > MEDIAN_TTFT_MS:
            break
        most = float(name.partition(", ")[2].removesuffix("/s"))
    return most


def _capacity(results: Results) -> list[str]:
    sentences = []
    for what, itl_ms in (("strict", STRICT_MS), ("relaxed", RELAXED_MS)):
        each = [f"{case.series} {bears(results, case.series, itl_ms):g}/s" for case in ENGINES]
        sentences.append(
            f"Capacity under the {what} objective (ITL p99 of {itl_ms:g} ms, median TTFT of 2 s), of the"
            f" rates tried: {'; '.join(each)}."
        )
    slow = ENGINES[0].label
    top = f", {RATES[-1]:g}/s"
    sarathi, first = (results[ENGINES[index].label + top] for index in (3, 2))
    return [
        *sentences,
        f"At {RATES[-1]:g}/s the longest gap is {figure(first, 'itl_ms.max'):,.0f} ms with prompts first and"
        f" {figure(sarathi, 'itl_ms.max'):,.0f} ms with chunks. The longest gap of FasterTransformer's way is"
        " the prompts of a batch, 8,192 tokens a step, before its first decode; at"
        f" {RATES[0]:g}/s its median request waits"
        f" {figure(results[slow + f', {RATES[0]:g}/s'], 'ttft_ms.p50') / 1e3:,.1f} s for its first token, at"
        f" {RATES[-1]:g}/s {figure(results[slow + top], 'ttft_ms.p50') / 1e3:,.1f} s.",
    ]


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [capacity()]
