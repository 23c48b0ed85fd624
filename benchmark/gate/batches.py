"""What must be true of batches that were served one after the other, as `vllm bench latency` does?

`latencies` holds the seconds of each batch; `avg_latency` and `percentiles` are computed from them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, finite, first
from benchmark.gate.summary import SLACK

LEAST_BATCHES = 10
ROUNDING_S = 2e-6  # of latencies given in microseconds


def batches_of(figures: Figures) -> NDArray[np.float64]:
    """Seconds of each; raises ValueError unless they are numbers above 0."""
    stated = figures.raw("latencies")
    if not isinstance(stated, list) or not stated:
        raise ValueError(f"latencies is {stated!r}; it must be a list of seconds, one for each batch")
    found = np.array([finite("a latency", each) for each in stated])
    if found.min() <= 0:
        raise ValueError(f"a latency is {found.min():g} s; it must be above 0")
    figures.used["batches"] = len(found)
    return found


def enough(figures: Figures) -> str | None:
    """A percentile of few batches says nothing."""
    count = len(batches_of(figures))
    return None if count >= LEAST_BATCHES else f"{count} batches were served; {LEAST_BATCHES} are the least"


def recount(figures: Figures) -> str | None:
    """Mean, percentiles and duration, computed again."""
    found_s = batches_of(figures)
    expected = {"avg_latency": float(found_s.mean()), "duration_s": float(found_s.sum())}
    for part in figures.raw("percentiles") or {}:
        expected[f"percentiles.{part}"] = float(np.percentile(found_s, float(part)))
    stated = {name: value for name in expected if (value := figures.given(name)) is not None}
    if not stated:
        raise NotCheckable("neither a mean, a percentile nor a duration is given")
    wrongs = []
    for name, value in stated.items():
        slack = SLACK / 2 * expected[name] + ROUNDING_S
        wrongs.append(differs(name, value, "that of the latencies", expected[name], slack))
    return first(wrongs)


def whole_batches(figures: Figures) -> str | None:
    """Each batch has all its requests, each with its whole answer, whose tokens come one after the other."""
    found_s = batches_of(figures)
    size, length = figures.number("batch_size"), figures.number("output_len")
    per_token_ms = figures.given("tpot_ms.mean") or 0.0
    tokens_ms, batch_ms = per_token_ms * (length - 1), 1e3 * float(found_s.mean())
    stated, completed = figures.number("output_tokens"), figures.number("completed")
    return first(
        [
            differs("completed", completed, "batches x batch_size", size * len(found_s), 0),
            differs("output_tokens", stated, "completed x output_len", completed * length, 0),
            exceeds("TPOT x (output_len - 1), in ms,", tokens_ms, "a batch", batch_ms, SLACK / 2 * batch_ms),
        ]
    )


LAWS = tuple(
    Law(name, statement, check, "latencies")
    for name, statement, check in (
        ("batches", f"at least {LEAST_BATCHES} batches", enough),
        ("recount, batches", "mean, percentiles and duration are those of the batches", recount),
        ("whole batches", "all requests of all batches have their tokens, in their time", whole_batches),
    )
)
