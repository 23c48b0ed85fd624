"""Reproduce the experiments on prompts that are computed in chunks."""

from __future__ import annotations

import math

from benchmark.reproduce.batching import ratio
from benchmark.reproduce.case import Case, Offered, chunked, keys, whole
from benchmark.reproduce.case_runs import Results, alone_s
from benchmark.reproduce.experiment import (
    ITL_99,
    ITL_MAX,
    OUTPUT,
    REQUESTS,
    TPOT,
    TTFT,
    TTFT_99,
    Chart,
    Experiment,
    figure,
)

LONG_PROMPT = 4096
RATE = 8.0
LOAD = Offered(600, long_every=20, long_tokens=LONG_PROMPT)
PROMPTS = Offered(300, rate_per_s=6, prompt_tokens=1024, most_prompt_tokens=3072)
CLAIMED_STALL_S, CLAIMED_TIMES, CLAIMED_LOSS, CLAIMED_OVERHEAD = 4.0, 20, 0.03, 1.25
FLOP_PER_TOKEN = 2 * 6.6e9


def whole_chunked() -> Experiment:
    """Return the experiment on the article's second pitfall."""
    engines = (
        Case("whole beside decodes", LOAD, whole("orca")),
        Case("whole while decodes wait", LOAD, whole("prefill_first")),
        Case("chunks of 2048", LOAD, chunked(2048)),
        Case("chunks of 512", LOAD, chunked(512)),
        Case("chunks of 128", LOAD, chunked(128)),
    )
    cases = tuple(each.at(rate) for rate in (RATE, math.inf) for each in engines)
    return Experiment(
        "whole_chunked",
        "Whole and chunked prompts",
        "a prompt of 4,096 tokens takes 4 s, and the TPOT is 4,187 ms; in chunks of 512 it is 204 ms, a"
        " 20th, for 3 % of the throughput. Here every 20th prompt has 4,096 tokens.",
        cases,
        (REQUESTS, TPOT, ITL_99, ITL_MAX, TTFT, TTFT_99),
        Chart((ITL_MAX, ITL_99, TPOT)),
        _whole_chunked,
        ("whole prefill", "chunked prefill", "whole prefill's stall", "a prompt in 8 chunks"),
    )


def _whole_chunked(results: Results) -> list[str]:
    case = Case("", LOAD)
    before, after = (results[f"{name}, {RATE:g}/s"] for name in ("whole beside decodes", "chunks of 512"))
    full, cut = (results[f"{name}, all at once"] for name in ("whole beside decodes", "chunks of 512"))
    short = results[f"chunks of 128, {RATE:g}/s"]
    one_s, parts_s = alone_s(case, LONG_PROMPT, LONG_PROMPT), alone_s(case, LONG_PROMPT, 512)
    rate = LONG_PROMPT * FLOP_PER_TOKEN / CLAIMED_STALL_S
    gaps = figure(before, "output_tokens") / figure(before, "completed") - 1
    return [
        f"At {RATE:g}/s the longest gap falls from {figure(before, 'itl_ms.max'):.0f} to"
        f" {figure(after, 'itl_ms.max'):.0f} ms, {ratio(before, after, 'itl_ms.max'):.1f} times; the mean"
        f" TPOT goes from {figure(before, 'tpot_ms.mean'):.1f} to {figure(after, 'tpot_ms.mean'):.1f} ms,"
        f" not to a {CLAIMED_TIMES}th: a stall is one gap of {gaps:.0f}.",
        f"At saturation chunks of 512 serve {ratio(cut, full, 'requests_per_s'):.3f} times the requests of"
        f" whole prompts (claimed: {1 - CLAIMED_LOSS:.2f}).",
        f"A prompt of 4,096 tokens alone takes {1e3 * one_s:.0f} ms by the roofline, not 4 s, which would be"
        f" {rate / 1e12:.0f} TFLOP/s of eight devices with 2,048 at their peak. In 8 chunks it takes"
        f" {1e3 * parts_s:.0f} ms ({1e3 * parts_s / 8:.0f} ms each, not 0.5): {parts_s / one_s:.2f} times the"
        " whole.",
        f"The price of short chunks is the first token: its p99 goes from {figure(before, 'ttft_ms.p99'):.0f}"
        f" ms with whole prompts to {figure(after, 'ttft_ms.p99'):.0f} ms in chunks of 512 and"
        f" {figure(short, 'ttft_ms.p99'):.0f} ms in chunks of 128.",
    ]


def chunk_kinds() -> Experiment:
    """Return the experiment on dynamic and adaptive chunk lengths, beside fixed ones."""
    base = {"policy": "stall_free", "num_slots": 64, "max_batch_tokens": 1024}
    dynamic = keys(
        **base,
        chunk="dynamic",
        min_chunk_tokens=128,
        max_chunk_tokens=512,
        chunk_stages=4,
        staged_tokens=3072,
    )
    adaptive = keys(**base, chunk="adaptive", min_chunk_tokens=64, max_chunk_tokens=960, target_itl_ms=30)
    cases = (
        Case("fixed 1024", PROMPTS, chunked(1024)),
        Case("fixed 512", PROMPTS, chunked(512)),
        Case("fixed 256", PROMPTS, chunked(256)),
        Case("dynamic 512 to 128", PROMPTS, dynamic),
        Case("adaptive, ITL p99 of 30 ms", PROMPTS, adaptive),
    )
    return Experiment(
        "chunk_kinds",
        "Fixed, dynamic and adaptive chunks",
        "chunks cost at most 1.25 times the whole prompt, and 257 tokens 32 % more than 256 (Sarathi"
        " article); an adaptive chunk keeps the latency that is asked for (chapter in Go). No table is"
        " given.",
        cases,
        (REQUESTS, OUTPUT, TTFT, TTFT_99, TPOT, ITL_99, ITL_MAX),
        Chart((ITL_99, TTFT_99)),
        _chunk_kinds,
        ("chunk sizes",),
    )


def _chunk_kinds(results: Results) -> list[str]:
    case = Case("", PROMPTS)
    whole_s = alone_s(case, 2048, 2048)
    costs = ", ".join(
        f"{alone_s(case, 2048, size) / whole_s:.2f} in chunks of {size}" for size in (1024, 512, 256, 128)
    )
    tile = alone_s(case, 257, 257) / alone_s(case, 256, 256) - 1
    adaptive = results["adaptive, ITL p99 of 30 ms"]
    return [
        f"Over the whole, a prompt of 2,048 tokens costs {costs} (roofline, alone). The claim of at most"
        f" {CLAIMED_OVERHEAD} holds where a chunk takes longer than the launches and sums of a step, which"
        " takes more tokens on 8 devices than on one.",
        f"257 tokens cost {tile:.0%} more than 256 here (tiles of 128 rows), not 32 %.",
        f"The adaptive chunk was asked for an ITL p99 of 30 ms and gives {figure(adaptive, 'itl_ms.p99'):.1f}"
        " ms. Dynamic lengths bound the chunk of a prompt, not the step: two prompts at once make longer"
        " steps than a fixed 512 does.",
    ]


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [whole_chunked(), chunk_kinds()]
