"""Reproduce the experiments on pipeline stages, and on separate engines for prompts and answers."""

from __future__ import annotations

from benchmark.reproduce.batching import ratio
from benchmark.reproduce.case import Case, Offered, chunked, keys, whole
from benchmark.reproduce.case_runs import Results
from benchmark.reproduce.experiment import (
    BUSY,
    GOOD,
    ITL_99,
    ITL_MAX,
    OUTPUT,
    REQUESTS,
    TPOT,
    TTFT,
    TTFT_99,
    Chart,
    Column,
    Experiment,
    figure,
)

STAGED = Offered(240, prompt_tokens=768, most_prompt_tokens=3072)
SHARED = Offered(320, prompt_tokens=768, most_prompt_tokens=3072)
BUBBLES = tuple(Column(f"bubble_s.{kind}", f"{kind}, s") for kind in ("PB1", "PB2", "PB3"))
RATES = (4.0, 8.0, 12.0)


def bubbles() -> Experiment:
    """Return the experiment on four stages of two devices."""
    cases = tuple(
        Case(label, STAGED, way, tensor=2, pipeline=4)
        for label, way in (
            ("whole prompts beside decodes", whole("orca")),
            ("whole prompts first", whole("prefill_first")),
            ("chunks of 1024", chunked(1024)),
            ("chunks of 512", chunked(512)),
            ("chunks of 256", chunked(256)),
        )
    )
    return Experiment(
        "bubbles",
        "Pipeline bubbles with and without chunks",
        "stages stand idle between prompts of different lengths (PB1), between a prompt and decodes (PB2)"
        " and between decodes over caches of different lengths (PB3); chunks of even size make bubbles small"
        " (Sarathi article). Here 4 stages of 2 devices, all requests at once.",
        cases,
        (REQUESTS, ITL_99, ITL_MAX, BUSY, *BUBBLES),
        Chart((REQUESTS, BUSY, *BUBBLES)),
        _bubbles,
    )


def _bubbles(results: Results) -> list[str]:
    def idle_s(name: str) -> float:
        return sum(figure(results[name], column.name) for column in BUBBLES)

    before, after = "whole prompts beside decodes", "chunks of 512"
    first = "whole prompts first"
    best = max(results, key=lambda name: figure(results[name], "requests_per_s"))
    gain = ratio(results[after], results[before], "requests_per_s")
    return [
        f"Bubbles of all stages together: {idle_s(before):.1f} s with whole prompts beside decodes,"
        f" {idle_s(first):.1f} s with prompts first, {idle_s(after):.1f} s in chunks of 512; throughput is"
        f" {gain:.2f} times the first's.",
        f"The most requests are served in {best}. PB3, of steps that hold no prompt, is"
        f" {figure(results[after], 'bubble_s.PB3') / idle_s(after):.0%} of what remains with chunks of 512:"
        " chunks cannot fill the steps of a time without prompts.",
    ]


def split() -> Experiment:
    """Return the experiment on prompts and answers on four devices each, beside chunks on both."""
    engines = (
        Case("chunks of 512 on 2 engines", SHARED, chunked(512), tensor=4, replicas=2),
        Case("whole prompts first on 2 engines", SHARED, whole("prefill_first"), tensor=4, replicas=2),
        Case(
            "split into prompts and answers",
            SHARED,
            keys(policy="stall_free", num_slots=128, max_batch_tokens=4096),
            tensor=4,
            split=(1, 1),
        ),
    )
    return Experiment(
        "split",
        "Prefill and decode apart, and chunks together",
        "apart, each phase has the devices that suit it, and neither disturbs the other; chunks come near to"
        " that on the same devices (Sarathi article, as a question; no figure). Here 8 devices in two"
        " engines of 4 either way.",
        tuple(engine.at(rate) for engine in engines for rate in RATES),
        (REQUESTS, OUTPUT, GOOD, TTFT, TTFT_99, TPOT, ITL_99, ITL_MAX),
        Chart((TTFT_99, ITL_99, GOOD), over_rate=True),
        _split,
    )


def _split(results: Results) -> list[str]:
    rate = list(results)[-1].partition(", ")[2]
    apart, together = (
        results[f"{name}, {rate}"]
        for name in ("split into prompts and answers", "chunks of 512 on 2 engines")
    )
    return [
        f"At {rate} the split's ITL p99 is {figure(apart, 'itl_ms.p99'):.1f} ms and the chunks'"
        f" {figure(together, 'itl_ms.p99'):.1f} ms: no answer shares a step with a prompt. Its throughput at"
        f" this load is {ratio(apart, together, 'requests_per_s'):.2f} times that of chunks, because the"
        " bandwidth of the engine of prompts is of no use to the answers.",
        f"The TTFT p99 is {figure(apart, 'ttft_ms.p99'):,.0f} ms apart and"
        f" {figure(together, 'ttft_ms.p99'):,.0f} ms in chunks; keys and values go over one link a device"
        " while later layers are computed, and the last prompt token takes a step more where it is answered.",
    ]


def experiments() -> list[Experiment]:
    """Return the experiments of this file, in the order of the report."""
    return [bubbles(), split()]
