"""Define the laws of batches that were served one after the other, as `vllm bench latency` does.

`latencies` holds the seconds of each batch; `avg_latency` and `percentiles` are computed from them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmark.gate.clocks import DRIFT, MOST_OFF, READ_S
from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, finite, first
from benchmark.gate.summary import SLACK

LEAST_BATCHES = 10
ROUNDING_S = 2e-6  # rounding of latencies in microseconds
ROUNDING_MS = 0.15  # rounding of latencies in tenths of milliseconds
COUNTED = ("completed", "prompt_tokens", "output_tokens")
COLUMNS = (  # columns of one batch
    *("latency_s", "first_step_s", "wall_s", "ttft_ms", "tpot_ms", "e2e_ms"),
    *("steps", "mean_batch", "prompt_tokens", "output_tokens", "completed"),
)


def batches_of(figures: Figures) -> NDArray[np.float64]:
    """Return the seconds of each batch; raises ValueError unless they are numbers above 0."""
    stated = figures.raw("latencies")
    if not isinstance(stated, list) or not stated:
        raise ValueError(f"latencies is {stated!r}; it must be a list of seconds, one for each batch")
    found = np.array([finite("a latency", each) for each in stated])
    if found.min() <= 0:
        raise ValueError(f"a latency is {found.min():g} s; it must be above 0")
    figures.used["batches"] = len(found)
    return found


def enough(figures: Figures) -> str | None:
    """Require enough batches: a percentile of few says nothing."""
    count = len(batches_of(figures))
    return None if count >= LEAST_BATCHES else f"{count} batches were served; {LEAST_BATCHES} are the least"


def recount(figures: Figures) -> str | None:
    """Recompute mean, percentiles and duration from the latencies."""
    found_s = batches_of(figures)
    expected = {"avg_latency": float(found_s.mean()), "duration_s": float(found_s.sum())}
    for part in figures.raw("percentiles") or {}:
        expected[f"percentiles.{part}"] = float(np.percentile(found_s, float(part)))
    stated = {name: value for name in expected if (value := figures.given(name)) is not None}
    if not stated:
        raise NotCheckable("neither a mean, a percentile nor a duration is given")
    wrongs = []
    for name, value in stated.items():
        slack = 1e-3 * expected[name] + ROUNDING_S
        wrongs.append(differs(name, value, "that of the latencies", expected[name], slack))
    return first(wrongs)


def whole_batches(figures: Figures) -> str | None:
    """Require that each batch has all its requests with whole answers, whose tokens follow one another."""
    found_s = batches_of(figures)
    size, length = figures.number("batch_size"), figures.number("output_len")
    per_token_ms = figures.given("tpot_ms.mean") or 0.0
    tokens_ms, batch_ms = per_token_ms * (length - 1), 1e3 * float(found_s.mean())
    stated, completed = figures.number("output_tokens"), figures.number("completed")
    prompts, input_len = figures.given("prompt_tokens"), figures.given("input_len")
    return first(
        [
            differs("completed", completed, "batches x batch_size", size * len(found_s), 0),
            differs("requests", figures.number("requests"), "batches x batch_size", size * len(found_s), 0),
            differs("output_tokens", stated, "completed x output_len", completed * length, 0),
            None
            if prompts is None or input_len is None
            else differs("prompt_tokens", prompts, "completed x input_len", completed * input_len, 0),
            None
            if length < 2 or figures.raw("clock") is None or figures.given("tpot_ms.mean") is not None
            else f"tpot_ms.mean is absent, and answers have {length:g} tokens",
            exceeds("TPOT x (output_len - 1), in ms,", tokens_ms, "a batch", batch_ms, SLACK / 2 * batch_ms),
        ]
    )


def one_by_one(figures: Figures) -> str | None:
    """Check each batch's requests, tokens and steps, and its time by two clocks against its parts."""
    if (columns := figures.raw("batches.columns")) != list(COLUMNS):
        return f"batches.columns is {columns!r}; it must be {', '.join(COLUMNS)}"
    names = [name for name in COLUMNS if name != "tpot_ms"]  # an answer of one token has no TPOT
    found = {name: figures.column(name, "batches") for name in names}
    latency_s, first_s, count = found["latency_s"], found["first_step_s"], len(found["latency_s"])
    size, length = figures.number("batch_size"), figures.number("output_len")
    expected = {"completed": size, "prompt_tokens": size * figures.number("input_len")}
    expected["output_tokens"] = size * length
    wrongs = [
        differs(f"{name} of a batch", float(value), "what each was asked for", expected[name], 0)
        for name in COUNTED
        for value in found[name]
        if value != expected[name]
    ][:1]
    if not np.array_equal(latency_s, batches_of(figures)):
        wrongs.append("latencies are not those of the batches, in their order")
    off_s = np.abs(latency_s - first_s - found["wall_s"])
    allowed_s = READ_S + DRIFT * latency_s
    if (off_s > allowed_s).mean() > MOST_OFF:
        at = int(np.argmax(off_s - allowed_s))
        by_wall_s = float(first_s[at] + found["wall_s"][at])
        what, slack_s = f"latency_s of batch {at + 1}", float(allowed_s[at])
        wrongs.append(differs(what, float(latency_s[at]), "first_step_s + wall_s", by_wall_s, slack_s))
    for name, below, above in (
        ("first_step_s before ttft_ms", 1e3 * first_s, found["ttft_ms"]),
        ("e2e_ms", found["e2e_ms"], 1e3 * latency_s),
        ("output_len", np.full(count, length), found["steps"]),
        ("output_tokens", found["output_tokens"], found["steps"] * (found["mean_batch"] + 0.006)),
        ("mean_batch", found["mean_batch"], np.full(count, size)),
    ):
        if (wrong := np.flatnonzero(below > above + ROUNDING_MS)).size:
            at = int(wrong[0])
            what = f"{name} of batch {at + 1}"
            wrongs.append(exceeds(what, float(below[at]), "its bound", float(above[at]), ROUNDING_MS))
    if length > 1:
        tpot_ms = figures.column("tpot_ms", "batches")
        sums_ms = found["ttft_ms"] + tpot_ms * (length - 1)
        slack_ms = 1e-3 * length + 1e-3 * found["e2e_ms"]
        if (wrong := np.flatnonzero(np.abs(sums_ms - found["e2e_ms"]) > slack_ms)).size:
            at = int(wrong[0])
            what, slack = f"TTFT + TPOT x gaps of batch {at + 1}", float(slack_ms[at])
            wrongs.append(differs(what, float(sums_ms[at]), "e2e_ms", float(found["e2e_ms"][at]), slack))
        stated = figures.given("tpot_ms.mean")
        if stated is not None:
            mean_ms = float(tpot_ms.mean())
            wrongs.append(differs("tpot_ms.mean", stated, "that of the batches", mean_ms, 0.002))
    return first(wrongs)


LAWS = (
    *tuple(
        Law(name, statement, check, "latencies")
        for name, statement, check in (
            ("batches", f"at least {LEAST_BATCHES} batches", enough),
            ("recount, batches", "mean, percentiles and duration are those of the batches", recount),
            ("whole batches", "all requests of all batches have their tokens, in their time", whole_batches),
        )
    ),
    Law("each batch", "its steps and tokens, and its time by two clocks", one_by_one, "batches"),
)
