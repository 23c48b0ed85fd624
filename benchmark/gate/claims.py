"""Define the laws of figures that are stated in passing: sizes, shares, costs, speed-ups.

Each law reads an object of its own in the result, so that a benchmark's figures are not subject to it.
"""

from __future__ import annotations

import math

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds

TOLD = 0.05  # relative tolerance of figures that an author rounded


def speed_up(figures: Figures) -> str | None:
    """Bound a speed-up over one request at a time by the number of slots.

    It holds for throughput; latencies that include the wait for a slot have no such bound.
    """
    most = figures.number("speed_up.slots")
    return exceeds("the speed-up", figures.number("speed_up.times"), "the slots", most, 0)


def kv_bytes(figures: Figures) -> str | None:
    """Recompute the bytes of keys and values over all layers."""
    shape = ("tokens", "num_layers", "num_kv_heads", "head_dim", "dtype_bytes")
    product = 2 * math.prod(figures.number(f"kv.{name}") for name in shape)
    return differs(
        "kv.bytes", figures.number("kv.bytes"), "2 x " + " x ".join(shape), product, TOLD * product
    )


def share(figures: Figures) -> str | None:
    """Check a cost that is stated as a share of the time, or of the whole, that it comes from."""
    part = figures.number("share.of") and figures.number("share.part") / figures.number("share.of")
    return differs("share.told", figures.number("share.told"), "part / whole", part, TOLD * part)


def pages(figures: Figures) -> str | None:
    """Check the pages of a request, or that a request may be so long."""
    size, stated = figures.positive("pages.size_tokens"), figures.number("pages.told")
    if (most := figures.given("pages.most_tokens")) is not None:
        return exceeds("pages.told x size_tokens", stated * size, "the longest request", most, 0)
    needed = math.ceil(figures.number("pages.tokens") / size)
    return differs("pages.told", stated, "tokens / size_tokens, rounded up,", needed, 0)


def pool(figures: Figures) -> str | None:
    """Require that requests hold no more pages than exist."""
    held, there = figures.number("pool.held"), figures.number("pool.there")
    return exceeds("the pages held", held, "the pages there are", there, 0)


def whole(figures: Figures) -> str | None:
    """Require that work done in parts costs no less than the whole."""
    cost_ms = figures.number("whole.ms")
    parts_ms = figures.number("whole.parts") * figures.number("whole.part_ms")
    return exceeds("the whole, in ms,", cost_ms, "its parts together", parts_ms, TOLD * parts_ms)


def window(figures: Figures) -> str | None:
    """Require that a pause which has to cover a step is at least as long as one."""
    step_ms, window_ms = figures.number("window.step_ms"), figures.number("window.ms")
    return exceeds("one step, in ms,", step_ms, "the window for it", window_ms, 0)


def stall(figures: Figures) -> str | None:
    """Check that stalls raise the mean gap of an answer by at most their length over its number of gaps."""
    rise_ms = figures.number("stall.tpot_after_ms") - figures.number("stall.tpot_before_ms")
    num_gaps = figures.number("stall.output_tokens") - 1
    if num_gaps < 1:
        raise NotCheckable("an answer of one token has no gap")
    most_ms = figures.number("stall.ms") * figures.number("stall.count") / num_gaps
    return exceeds("the rise of TPOT, in ms,", rise_ms, "stalls / gaps", most_ms, TOLD * most_ms)


def copy(figures: Figures) -> str | None:
    """Require that a copy has time to read and to write each byte."""
    least_ms = 2 * figures.number("copy.bytes") / (figures.positive("copy.memory_gb_per_s") * 1e9) * 1e3
    return exceeds("2 x bytes / bandwidth, in ms,", least_ms, "copy.ms", figures.number("copy.ms"), 0)


def budget(figures: Figures) -> str | None:
    """Require that the requests of one batch fit its tokens together."""
    least = figures.number("budget.slots") * figures.number("budget.request_tokens")
    return exceeds("slots x request_tokens", least, "the budget", figures.number("budget.tokens"), 0)


def stages(figures: Figures) -> str | None:
    """Check chunk sizes in equal steps from high to low, rounded to a multiple (halves to even) or exact."""
    stated = figures.raw("stages.told")
    if stated is None:
        raise NotCheckable("stages.told is absent")
    low, high, multiple = (figures.number(f"stages.{name}") for name in ("low", "high", "multiple"))
    exact = [high - index * (high - low) / (len(stated) - 1) for index in range(len(stated))]
    rounded = [multiple * round(size / multiple) for size in exact]
    return None if stated in (exact, rounded) else f"{stated} is stated; exact is {exact}, rounded {rounded}"


LAWS = (
    Law("speed-up", "over one at a time: at most the slots", speed_up, "speed_up"),
    Law("KV bytes", "2 x tokens x layers x heads x dim x bytes, within 5 %", kv_bytes, "kv"),
    Law("share", "the stated share is part / whole, within 5 %", share, "share"),
    Law("pages", "tokens / page size, rounded up, and within the longest request", pages, "pages"),
    Law("pool", "pages held <= pages there are", pool, "pool"),
    Law("whole", "the parts of a work cost together no less than the whole, within 5 %", whole, "whole"),
    Law("window", "a window that is to hold a step is as long as one", window, "window"),
    Law("stall", "stalls raise a mean gap by their length / the gaps, within 5 %", stall, "stall"),
    Law("copy", "a copy takes 2 x bytes / bandwidth", copy, "copy"),
    Law("budget", "slots x tokens of a request <= the tokens of a batch", budget, "budget"),
    Law("stages", "equal steps, rounded", stages, "stages"),
)
