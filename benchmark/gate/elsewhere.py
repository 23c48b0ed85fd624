"""Compute a figure from the other sources in a result.

The sources are the requests' records, the readings taken at steps, the engine's counters before and after,
the recipe's settings, and the machine. Each function returns a number, or raises NotCheckable where the
source is absent or counts something else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmark.gate.law import Figures, NotCheckable
from benchmark.gate.records import column, done

Value = Callable[[Figures], float]


def plain(figures: Figures) -> None:
    """Raise NotCheckable unless each request is one sequence, all of whose tokens came in steps.

    Otherwise the engine has counted more than the figures cover.
    """
    figures.number("mean_in_system")
    if any(record.get("token_times_s") is None for record in figures.records()):
        raise NotCheckable("the times of some tokens are not given")
    stepwise(figures)


def stepwise(figures: Figures) -> None:
    """Raise NotCheckable unless the readings were taken at the ends of an engine's steps."""
    if figures.raw("benchmark") == "serve":
        raise NotCheckable("the readings were taken each second, not at steps")
    figures.column("at_s")


def last(name: str) -> Value:
    """Return the count of the last reading."""

    def value(figures: Figures) -> float:
        plain(figures)
        return float(figures.column(name)[-1])

    return value


def per(part: str, whole: str) -> Value:
    """Return one sum of the last reading over another."""

    def value(figures: Figures) -> float:
        stepwise(figures)
        return float(figures.column(part)[-1]) / max(1.0, float(figures.column(whole)[-1]))

    return value


def page_use(figures: Figures) -> float:
    """Return the mean share of pages held, from the sum over all steps."""
    return per("page_steps", "steps")(figures) / figures.positive("num_pages")


def over_time(figures: Figures) -> float:
    """Return the mean number of requests in slots, from their summed seconds over the duration."""
    return last("running_s")(figures) / figures.positive("duration_s")


def all_steps(figures: Figures) -> None:
    """Raise NotCheckable unless there is a reading of every step."""
    stepwise(figures)
    if figures.number("steps") != len(figures.column("at_s")):
        raise NotCheckable("not every step has a reading")


def mean_running_at_steps(figures: Figures) -> float:
    """Return the mean number of running requests, which bounds the spans of a step."""
    all_steps(figures)
    return float(figures.column("running").mean())


def mean_usage_at_steps(figures: Figures) -> float:
    """Return the mean share of pages held, over all steps."""
    all_steps(figures)
    return float(figures.column("kv_usage").mean())


def num_readings(figures: Figures) -> float:
    """Return the number of readings, of which there is at most one for each step."""
    stepwise(figures)
    return len(figures.column("at_s"))


def steps_of_few(figures: Figures) -> float:
    """Return the number of readings of a run in which each step has one.

    Only a run of more than 500 steps leaves some out, and it then has more than 250 readings.
    """
    count = num_readings(figures)
    if count > 250:
        raise NotCheckable("there may be steps without a reading")
    return count


def growth(name: str) -> Value:
    """Return how much an engine's counter grew in the run."""

    def value(figures: Figures) -> float:
        plain(figures)
        return figures.number(f"counters.after.{name}") - figures.number(f"counters.before.{name}")

    return value


def hit_share(figures: Figures) -> float:
    """Return the share of the prompts' tokens that were hits, by the counters."""
    return growth("hit_tokens")(figures) / max(1.0, growth("prompt_tokens")(figures))


def hit_share_in(name: str, part: str) -> Value:
    """Return a share of the prompts' tokens since the engine was built."""

    def value(figures: Figures) -> float:
        return figures.number(f"{name}.{part}") / max(1.0, figures.number(f"{name}.prompt_tokens"))

    return value


def most_hits(figures: Figures) -> float:
    """Bound the hit rate by all hits that the cache has had, as if all were in this run.

    Every run has the same prompts.
    """
    runs = figures.raw("runs_output_tokens_per_s") or [0]
    num_runs = len(runs) + figures.number("warm_up_runs")
    return min(1.0, figures.number("cache_after_all_runs.hit_rate") * num_runs)


def moved(counter: str) -> Value:
    """Return the bytes of pages that were moved since the engine was built."""
    return lambda figures: (
        figures.number(f"counters_after_all_runs.{counter}") * figures.positive("page_bytes")
    )


def figure(name: str, plus: float = 0.0) -> Value:
    """Return another figure, which is the same by definition, plus a constant."""
    return lambda figures: figures.number(name) + plus


def zero(figures: Figures) -> float:
    """Return 0, which an engine at rest must have."""
    return 0.0 * figures.number("cache_after_all_runs.free_pages")


def free_pages(figures: Figures) -> float:
    """Return the pages that are neither held nor cached."""
    taken = sum(figures.number(f"cache_after_all_runs.{name}") for name in ("held_pages", "idle_pages"))
    return figures.number("num_pages") - taken


def grown_page(figures: Figures) -> float:
    """Return the bytes that a page's tokens take in the layers whose cache grows."""
    return figures.number("page_size") * figures.number("kv_bytes_per_token")


def in_system(figures: Figures) -> float:
    """Return the mean number in the system: all requests' times in the system over the duration.

    It is exact for an engine in this process, which knows when each request came.
    """
    plain(figures)
    completed = done(figures)
    spent_s = column(completed, "finish_s").sum() - column(completed, "arrival_s").sum()
    return float(spent_s) / figures.positive("duration_s")


def decoding(figures: Figures) -> float:
    """Return the mean number of requests between first and last token, all of which are running.

    Raises NotCheckable after a preemption, which lets a request wait between its tokens.
    """
    plain(figures)
    if figures.number("preemptions"):
        raise NotCheckable("preempted requests wait between their tokens, and are in no slot")
    completed = done(figures)
    spent_s = column(completed, "finish_s").sum() - column(completed, "first_token_s").sum()
    return float(spent_s) / figures.positive("duration_s")


def ended_by(reason: str) -> Value:
    """Return how many records ended for a reason."""
    return lambda figures: sum(each.get("finish_reason") == reason for each in figures.records())


def asked_tokens(figures: Figures) -> float:
    """Return the sum of the tokens that the records asked for at most."""
    records = figures.records()
    if any(each.get("max_tokens") is None for each in records):
        raise NotCheckable("a record does not say how many tokens were asked for")
    return float(column(records, "max_tokens").sum())


def extreme_answer(choose: Callable[[list[float]], float]) -> Value:
    """Return the length of the shortest or the longest answer of the records."""
    return lambda figures: choose(column(done(figures), "output_tokens").tolist())


def cached_share(figures: Figures) -> float:
    """Return the share of the prompts' tokens that the server reported as cached, by record."""
    known = [each for each in done(figures) if each.get("cached_tokens") is not None]
    if not known:
        raise NotCheckable("no record says how many tokens were found cached")
    return float(column(known, "cached_tokens").sum() / max(1.0, column(known, "prompt_tokens").sum()))


def together(ends_first: bool) -> Value:
    """Return the most requests on their way at once, by the records' own times.

    The order of two events in one microsecond is not known; `ends_first` chooses it.
    """

    def value(figures: Figures) -> float:
        records = figures.records()
        if any(each.get("end_s") is None for each in records):
            raise NotCheckable("not every record says when its connection ended")
        begin_s, end_s = column(records, "arrival_s"), column(records, "end_s")
        times = np.concatenate([begin_s, end_s])
        change = np.concatenate([np.ones(len(records)), -np.ones(len(records))])
        order = np.lexsort((change if ends_first else -change, times))
        return float(np.cumsum(change[order]).max())

    return value


def part_of_column(name: str, percent: float) -> Value:
    """Return a percentile of a column of the records, in the same unit."""

    def value(figures: Figures) -> float:
        return float(np.percentile(column(figures.records(), name), percent))

    return value


def mean_reading(name: str) -> Value:
    """Return the mean of a gauge while the server was loaded: first and last reading are of an idle one."""

    def value(figures: Figures) -> float:
        if figures.raw("benchmark") != "serve":
            raise NotCheckable("the readings were taken at steps")
        readings = figures.column(name)[1:-1]
        if not len(readings):
            raise NotCheckable("there is no reading of the loaded server")
        return float(readings.mean())

    return value


def server_growth(name: str) -> Value:
    """Return how much a server's counter grew while it was loaded."""

    def value(figures: Figures) -> float:
        return figures.number(f"metrics.after.{name}") - figures.number(f"metrics.before.{name}")

    return value


def server_ratio(part: str, whole: str, times: float = 1.0) -> Value:
    """Return one counter's growth over another's."""

    def value(figures: Figures) -> float:
        count = server_growth(whole)(figures)
        if count <= 0:
            raise NotCheckable(f"the server's {whole} did not grow")
        return times * server_growth(part)(figures) / count

    return value


def alone_at_server(figures: Figures) -> None:
    """Raise NotCheckable if the server served other requests too: its counters are then not of these."""
    if server_growth("requests")(figures) != figures.number("completed") or figures.number("failed"):
        raise NotCheckable("the server answered other requests, too")


def ours_at_server(value: Value) -> Value:
    """Restrict a value to a server that served only these requests."""

    def of_ours(figures: Figures) -> float:
        alone_at_server(figures)
        return value(figures)

    return of_ours
