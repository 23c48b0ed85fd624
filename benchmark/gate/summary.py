"""Define the laws of a run's summary figures, whatever served it.

X is throughput, in requests a second; W is a request's time in the system; N is the mean number of requests
there. A latency, such as `ttft_ms`, is an object of `mean`, `p50`, `p90`, `p99` and whichever of `min`, `p95`
and `max` are known. Every slack has a reason: rounding, chance, or the length of a step.
"""

from __future__ import annotations

import math
from itertools import pairwise

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from devices.profile import load

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
ORDER = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
COUNTS = ("requests", "completed", "failed", "duration_s", "prompt_tokens", "output_tokens", "steps")
SHARES = ("good_share", "fluidity", "prefix_hit_rate", "mean_page_use", "busy_share")
MEANS = ("mean_batch", "mean_running", "mean_in_system", "mean_in_flight")
RATES: dict[str, tuple[str, ...]] = {
    "requests_per_s": ("completed",),
    "output_tokens_per_s": ("output_tokens",),
    "total_tokens_per_s": ("prompt_tokens", "output_tokens"),
}
SLACK = 0.02  # tolerance of figures that are the same by definition, and were rounded
LITTLE_SLACK = 0.05  # tolerance of an average over time, taken at the ends of steps
ROUNDING_MS = 0.002  # tolerance of latencies with three decimals
LEAST_SAMPLES = 30  # least number of requests; a result may ask for more by `least_samples`


def signs(figures: Figures) -> str | None:
    """Check the signs of counts, durations, rates, means over time, shares and latencies."""
    latencies = [f"{each}.{part}" for each in LATENCIES for part in ("mean", *ORDER)]
    names = [*COUNTS, *RATES, *MEANS, *SHARES, *latencies]
    values = {name: value for name in names if (value := figures.given(name)) is not None}
    if not values:
        raise NotCheckable("no figure is known by its name")
    below = [f"{name} is {value:g}, below 0" for name, value in values.items() if value < 0]
    return first(
        below + [exceeds(name, values[name], "the whole", 1, 0) for name in SHARES if name in values]
    )


def samples(figures: Figures) -> str | None:
    """Require enough requests: a percentile of few says nothing."""
    least = max(LEAST_SAMPLES, figures.given("least_samples") or 0)
    completed = figures.number("completed")
    return None if completed >= least else f"{completed:g} requests were answered; {least:g} are the least"


def warm_up(figures: Figures) -> str | None:
    """Require one warm-up at least, which is no part of a rate."""
    counted = figures.number("warm_up_counted")
    runs = figures.given("warm_up_runs")
    return first(
        [
            f"{counted:g} warm-up runs are counted in" if counted else None,
            "no run went before the counted ones, so the first is its own warm-up" if runs == 0 else None,
        ]
    )


def all_counted(figures: Figures) -> str | None:
    """Require that failed requests stay in the denominator."""
    parts = [figures.number("completed"), figures.number("failed"), figures.given("unfinished") or 0.0]
    return differs("completed + failed + unfinished", sum(parts), "requests", figures.number("requests"), 0)


def offered(figures: Figures) -> str | None:
    """Check that no more is served than arrives, plus three standard deviations for chance."""
    served, most = figures.number("requests_per_s"), figures.number("offered_per_s")
    count = figures.given("completed")
    slack = 3 / math.sqrt(count) if count and count > 0 else LITTLE_SLACK
    return exceeds("requests_per_s", served, "offered_per_s", most, slack * most)


def rates(figures: Figures) -> str | None:
    """Check each given rate against the counts that it comes from."""
    duration_s = figures.number("duration_s")
    wrongs, stated = [], 0
    for name, parts in RATES.items():
        rate, counts = figures.given(name), [figures.given(part) for part in parts]
        if rate is None or None in counts:
            continue
        stated += 1
        count = sum(each for each in counts if each is not None)
        slack = SLACK / 2 * count + 0.001 * duration_s + 0.0001 * rate
        wrongs.append(differs(f"{name} x duration_s", rate * duration_s, " + ".join(parts), count, slack))
    if not stated:
        raise NotCheckable("no rate is given with its count")
    return first(wrongs)


def median_run(figures: Figures) -> str | None:
    """Check that the reported run is no better than the median of the counted runs."""
    runs = figures.raw("runs_output_tokens_per_s")
    if not runs:
        raise NotCheckable("runs_output_tokens_per_s is absent")
    if not isinstance(runs, list) or not all(isinstance(each, (int, float)) for each in runs):
        raise ValueError(f"runs_output_tokens_per_s is {runs!r}; it must be a list of numbers")
    median = sorted(runs)[len(runs) // 2]
    stated = figures.number("output_tokens_per_s")
    return exceeds("output_tokens_per_s", stated, "the median of the runs", median, SLACK / 2 * median)


def little(figures: Figures) -> str | None:
    """Check N = X W.

    A request that comes during a step is seen at the step's end, so one step for each request is slack.
    """
    held, served = figures.number("mean_in_system"), figures.number("requests_per_s")
    expected = served * figures.number("e2e_ms.mean") / 1e3
    steps = figures.given("steps")
    unseen = figures.number("completed") / steps if steps else 0.0
    slack = LITTLE_SLACK * max(held, expected) + unseen
    return differs("mean_in_system", held, "X W = requests_per_s x e2e_ms.mean", expected, slack)


def num_gaps(figures: Figures, completed: float) -> float:
    """Return the number of gaps that the ITL averages: as given, or one before each token after the first."""
    stated = figures.given("itl_gaps")
    return max(0.0, figures.number("output_tokens") - completed) if stated is None else stated


def decoding(figures: Figures) -> float:
    """Return a lower bound on the mean number of requests between first and last token.

    It is exact from the mean gap and the number of gaps; otherwise each of X requests has at least
    `least_output_tokens` tokens.
    """
    if figures.number("preemptions"):
        raise NotCheckable("preempted requests wait between their tokens, and are in no slot")
    gap_ms, tokens = figures.given("itl_ms.mean"), figures.given("output_tokens")
    count, duration_s = figures.given("completed"), figures.given("duration_s")
    if gap_ms is not None and tokens is not None and count is not None and duration_s:
        return gap_ms / 1e3 * num_gaps(figures, count) / duration_s
    gaps = figures.number("least_output_tokens") - 1
    return figures.number("requests_per_s") * figures.number("tpot_ms.mean") / 1e3 * gaps


def running(figures: Figures) -> str | None:
    """Check N = X W for requests in slots: decoding ones run, and running ones are in the system."""
    stated = figures.number("mean_running")
    load = decoding(figures)
    held = figures.given("mean_in_system")
    return first(
        [
            exceeds("decoding, X x TPOT x gaps,", load, "mean_running", stated, LITTLE_SLACK * stated),
            None if held is None else exceeds("mean_running", stated, "mean_in_system", held, SLACK * held),
        ]
    )


def slots(figures: Figures) -> str | None:
    """Check that X W of the decoding requests, and every mean number of them, is at most the slots."""
    most = figures.number("slots")
    means = {name: figures.given(name) for name in ("mean_running", "mean_batch")}
    wrongs = [exceeds(name, mean, "slots", most, 0) for name, mean in means.items() if mean is not None]
    try:
        load = decoding(figures)
    except NotCheckable:
        if not wrongs:
            raise
    else:
        wrongs.append(exceeds("decoding, X x TPOT x gaps,", load, "slots", most, SLACK * most))
    return first(wrongs)


def spans(figures: Figures) -> str | None:
    """Check that the spans of all steps suffice for the output tokens."""
    computed = figures.number("mean_batch") * figures.number("steps")
    least = figures.number("output_tokens") / figures.positive("max_tokens_per_step")
    slack = SLACK * computed + 0.005 * figures.number("steps")
    return exceeds("output_tokens / max_tokens_per_step", least, "mean_batch x steps", computed, slack)


def monotone(figures: Figures) -> str | None:
    """Check that a higher percentile has a value that is no lower."""
    wrongs, stated = [], 0
    for name in LATENCIES:
        values = [(part, value) for part in ORDER if (value := figures.given(f"{name}.{part}")) is not None]
        stated += len(values) - 1 if values else 0
        wrongs += [
            exceeds(f"{name}.{low}", least, f"{name}.{high}", most, 0)
            for (low, least), (high, most) in pairwise(values)
        ]
    if not stated:
        raise NotCheckable("no latency has two percentiles")
    return first(wrongs)


def means(figures: Figures) -> str | None:
    """Check that a mean lies within min and max, and above the least mean that the percentiles allow.

    Of n values at least (n - 1)(1 - q) are as high as the q-quantile, interpolated or not.
    """
    wrongs, stated = [], 0
    completed, tokens = figures.given("completed"), figures.given("output_tokens")
    for name in LATENCIES:
        mean = figures.given(f"{name}.mean")
        known = {part: figures.given(f"{name}.{part}") for part in ORDER}
        if mean is None or not any(value is not None for value in known.values()):
            continue
        stated += 1
        count = 2.0 if name == "tpot_ms" or not completed else completed
        if name == "itl_ms":
            count = 2.0 if tokens is None or completed is None else max(2.0, num_gaps(figures, completed))
        least, below = 0.0, 0.0
        for part, value in known.items():
            if value is not None and part != "max":
                share = 1.0 if part == "min" else (1 - 1 / count) * (1 - ORDER[part])
                least, below = least + max(0.0, value - below) * share, max(below, value)
        slack = SLACK / 2 * mean + ROUNDING_MS
        wrongs.append(exceeds(f"the least mean of {name}'s percentiles", least, f"{name}.mean", mean, slack))
        if (most := known["max"]) is not None:
            wrongs.append(exceeds(f"{name}.mean", mean, f"{name}.max", most, slack))
    if not stated:
        raise NotCheckable("no latency has a mean and a percentile")
    return first(wrongs)


def first_before_last(figures: Figures) -> str | None:
    """Check that no answer ends before it begins, in the mean and in every percentile."""
    wrongs, stated = [], 0
    for part in ("mean", *ORDER):
        begun, ended = figures.given(f"ttft_ms.{part}"), figures.given(f"e2e_ms.{part}")
        if begun is not None and ended is not None:
            stated += 1
            wrongs.append(exceeds(f"ttft_ms.{part}", begun, f"e2e_ms.{part}", ended, ROUNDING_MS))
    if not stated:
        raise NotCheckable("ttft_ms and e2e_ms have no part in common")
    return first(wrongs)


def gaps(figures: Figures) -> str | None:
    """Check that E2E - TTFT of all requests is the sum of all gaps between tokens, or pieces (`itl_gaps`)."""
    completed = figures.number("completed")
    spent_ms = (figures.number("e2e_ms.mean") - figures.number("ttft_ms.mean")) * completed
    count = num_gaps(figures, completed)
    all_ms = figures.number("itl_ms.mean") * count
    slack = SLACK * max(spent_ms, all_ms) + ROUNDING_MS * (completed + count)
    return differs("(E2E - TTFT) x completed", spent_ms, "ITL x gaps, in ms,", all_ms, slack)


def tpot_of_gaps(figures: Figures) -> str | None:
    """Check TPOT, which averages gaps by request, against ITL, which averages all gaps.

    They differ only by the lengths of the answers.
    """
    completed, least = figures.number("completed"), figures.number("least_output_tokens")
    most, tpot_ms = figures.number("most_output_tokens"), figures.number("tpot_ms.mean")
    if least < 2:
        raise NotCheckable("some answers have a single token, and no TPOT")
    count = num_gaps(figures, completed)
    if count > figures.number("output_tokens") - completed:
        raise NotCheckable("a search went on after tokens that its best answer has not")
    all_ms = figures.number("itl_ms.mean") * count
    slack = SLACK * all_ms + ROUNDING_MS * count
    fewest, largest = tpot_ms * completed * (least - 1), tpot_ms * completed * (most - 1)
    return first(
        [
            exceeds("TPOT x completed x the least gaps", fewest, "ITL x gaps, in ms,", all_ms, slack),
            exceeds("ITL x gaps, in ms,", all_ms, "TPOT x completed x the most gaps", largest, slack),
        ]
    )


def roofline(figures: Figures) -> str | None:
    """Check that TPOT is no less than the time to read all weights and a request's own keys and values.

    A request of one token has no TPOT, so its prompt is not among those read.
    """
    name = figures.raw("device_profile")
    if name is None:
        raise NotCheckable("device_profile is absent")
    profile = load(str(name))
    read = figures.positive("weight_bytes_per_step")
    prompt, completed = figures.given("prompt_tokens"), figures.given("completed")
    some_of_one = (figures.given("least_output_tokens") or 2) < 2
    if prompt and completed and not some_of_one and (per_token := figures.given("kv_bytes_per_token")):
        read += per_token * prompt / completed
    num_devices, per_step = figures.positive("num_devices"), figures.positive("max_tokens_per_step")
    floor_ms = profile.read_ms(read, num_devices) / per_step
    tpot_ms = figures.number("tpot_ms.mean")
    figures.used |= {"floor_ms": floor_ms, "memory_gb_per_s": profile.memory_gb_per_s}
    what = f"the floor of {profile.name} ({profile.basis} efficiency {profile.efficiency:g}), in ms,"
    return exceeds(what, floor_ms, "tpot_ms.mean", tpot_ms, SLACK * tpot_ms + ROUNDING_MS)


LAWS = (
    Law("signs", "no count, duration, rate, mean, share or latency is negative; no share above 1", signs),
    Law("samples", f"at least {LEAST_SAMPLES} requests, or as many as the result asks for", samples),
    Law("warm-up", "no warm-up is counted in, and there was one", warm_up),
    Law("all counted", "every request is completed, failed or said to be unfinished", all_counted),
    Law("served <= offered", "X <= the rate of arrivals, but for chance", offered),
    Law("rate x duration", "a rate times the duration is the count", rates),
    Law("median run", "the reported run is no better than the median one", median_run),
    Law("Little", "N = X W, within 5 % and a step", little),
    Law("Little, running", "X x TPOT x gaps <= the mean number running, within 5 %", running),
    Law("slots", "X W of those that decode <= slots, and so is every mean number of them", slots),
    Law("spans", "mean batch x steps >= output tokens", spans),
    Law("percentiles", "percentiles do not fall", monotone),
    Law("means", "a mean fits its percentiles, min and max", means),
    Law("TTFT <= E2E", "in the mean and in every percentile", first_before_last),
    Law("E2E = TTFT + gaps", "summed over all requests, within 2 %", gaps),
    Law("TPOT of ITL", "TPOT and ITL differ by the answers' lengths only, within 2 %", tpot_of_gaps),
    Law("roofline", "TPOT >= bytes of weights and keys and values / bandwidth", roofline),
)
