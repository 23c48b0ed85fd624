"""Define the laws of a run's readings, among themselves and beside the times of its requests.

A reading has what was there at the end of a step, and what was counted from the start of the run up to then.
Where each step has its reading, the count of one step is the difference of two readings.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmark.gate import elsewhere as other
from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from benchmark.gate.records import DONE, column, done, times_of, value

SAME_S = 2e-6  # tolerance between two entries of one moment, given in microseconds
LEAST_ITL_MS = 1.0  # the least ITL at which a client can tell a server's tokens apart
MOST_TOGETHER = 0.75  # share of all pieces that a client on a busy machine may read at one time
SUMS = (
    *("steps", "spans", "tokens", "sampled", "ended", "page_steps", "running_s"),
    *("prompt_tokens", "hit_tokens", "preemptions", "cpu_s"),
)
Array = NDArray[np.float64]


def _worst(what: str, values: Array, bound: str, most: Array, slack: float | Array) -> str | None:
    """Report the first reading at which a value is above its bound."""
    wrong = np.flatnonzero(values > most + slack)
    if not len(wrong):
        return None
    at = int(wrong[0])
    tolerance = float(np.broadcast_to(slack, values.shape)[at])
    return exceeds(f"{what} at reading {at + 1}", float(values[at]), bound, float(most[at]), tolerance)


def _same(what: str, values: Array, bound: str, expected: Array, slack: float | Array = 0.0) -> str | None:
    """Report the first reading at which two numbers differ."""
    wrong = np.flatnonzero(np.abs(values - expected) > slack)
    if not len(wrong):
        return None
    at = int(wrong[0])
    tolerance = float(np.broadcast_to(slack, values.shape)[at])
    return differs(f"{what} at reading {at + 1}", float(values[at]), bound, float(expected[at]), tolerance)


def in_step(figures: Figures) -> bool:
    """Return whether a reading is of the step that ended; with overlap the next has begun by then."""
    return not figures.raw("settings.scheduler.overlap")


def sums(figures: Figures) -> str | None:
    """Check that time advances, that sums never fall, and that each fits the state at the reading."""
    at_s = figures.column("at_s")
    if (back := np.flatnonzero(np.diff(at_s) <= 0)).size:
        return f"reading {int(back[0]) + 2} is at {at_s[back[0] + 1]:g} s, not after the one before"
    other.stepwise(figures)
    found = {name: figures.column(name) for name in (*SUMS, "running", "kv_usage", "held_pages")}
    for name in SUMS:
        if (fell := np.flatnonzero(np.diff(found[name]) < 0)).size:
            return f"{name} falls at reading {int(fell[0]) + 2}, and is a sum"
    steps, pages = found["steps"], figures.positive("num_pages")
    taken = {name: np.diff(found[name], prepend=0.0) for name in SUMS}
    slots = figures.given("slots")
    wrongs = [
        _same("kv_usage", found["kv_usage"], "held_pages / num_pages", found["held_pages"] / pages, 6e-5),
        _worst("one step", np.ones(len(steps)), "the steps since the reading before", taken["steps"], 0),
        _worst("spans", taken["spans"], "its tokens", taken["tokens"], 0),
        _worst("hit_tokens", found["hit_tokens"], "prompt_tokens", found["prompt_tokens"], 0),
        _worst("held_pages", found["held_pages"], "what the steps held together", taken["page_steps"], 0),
    ]
    if figures.given("mean_in_system") is not None:  # otherwise a prompt may have several answers, or none
        wrongs += [
            _worst("steps without spans", taken["steps"], "its spans", taken["spans"], 0),
            _worst("sampled tokens", taken["sampled"], "its spans", taken["spans"], 0),
            _worst("ended", taken["ended"], "its sampled tokens", taken["sampled"], 0),
        ]
    if (budget := figures.given("settings.scheduler.max_batch_tokens")) is not None:
        wrongs.append(
            _worst("tokens", taken["tokens"], "steps x max_batch_tokens", budget * taken["steps"], 0)
        )
    if slots is not None:
        wrongs.append(_worst("spans", taken["spans"], "steps x slots", slots * taken["steps"], 0))
        wrongs.append(_worst("running", found["running"], "slots", np.full(len(steps), slots), 0))
    if len(steps) == figures.number("steps") and in_step(figures):
        wrongs += [
            _same("steps", steps, "the number of the reading", np.arange(1.0, len(steps) + 1)),
            _same("page_steps", taken["page_steps"], "held_pages", found["held_pages"]),
        ]
        if figures.given("mean_in_system") is not None:  # a search that has ended had several rows
            what = "the requests that run"
            wrongs.append(_worst("spans", taken["spans"], what, found["running"], 0))
        between_s = found["running"] * np.diff(at_s, prepend=min(0.0, float(at_s[0])))
        slack = 1e-5 * (1 + found["running"])
        wrongs.append(_worst("running_s", taken["running_s"], "running x the time between", between_s, slack))
    return first(wrongs)


def computed(figures: Figures) -> str | None:
    """Check that each token is computed once, and lost tokens once more.

    Computed are the tokens of prompts that were not hits, sampled tokens except an answer's last, and what
    preemption lost and did not find again.
    """
    other.plain(figures)
    tokens = float(figures.column("tokens")[-1])
    hits = float(figures.column("hit_tokens")[-1])
    expected = figures.number("prompt_tokens") - hits
    expected += figures.number("output_tokens") - figures.number("completed")
    lost = other.growth("lost_tokens")(figures) - other.growth("refound_tokens")(figures)
    counted = other.growth("computed_tokens")(figures)
    # A stopped answer may have had one more token computed.
    ahead = 0.0 if in_step(figures) else figures.number("completed")
    what = "prompt_tokens - hits + output_tokens - completed + lost"
    return first(
        [
            differs("computed_tokens (counters)", counted, "the tokens of all steps", tokens, 0),
            exceeds(what, expected + lost, "the tokens of all steps", tokens, 0),
            exceeds("the tokens of all steps", tokens, what, expected + lost, ahead),
        ]
    )


def of_requests(figures: Figures) -> str | None:
    """Check that tokens and requests' ends came at the ends of steps, as many as each reading counted.

    The number of requests at each reading has to fit the records as well.
    """
    other.plain(figures)
    completed = done(figures)
    at_s = figures.column("at_s")
    came_s = np.sort(np.concatenate([np.array(times_of(each) or []) for each in completed]))
    begin_s, first_s, end_s = (
        np.sort(column(completed, name)) for name in ("arrival_s", "first_token_s", "finish_s")
    )

    def until(times_s: Array, moments_s: Array) -> Array:
        return np.searchsorted(times_s, moments_s + SAME_S, side="right").astype(float)

    def before(times_s: Array) -> Array:
        return np.searchsorted(times_s, at_s - SAME_S, side="left").astype(float)

    wrongs = [
        _same("sampled", figures.column("sampled"), "the records' tokens by then", until(came_s, at_s)),
        _same("ended", figures.column("ended"), "the records' ends by then", until(end_s, at_s)),
    ]
    if len(at_s) == figures.number("steps"):
        nearest = np.clip(np.searchsorted(at_s, came_s - SAME_S), 0, len(at_s) - 1)
        if (off := np.flatnonzero(np.abs(at_s[nearest] - came_s) > SAME_S)).size:
            wrongs.append(f"a token came at {came_s[off[0]]:g} s, which is the end of no step")
    if not in_step(figures):
        return first(wrongs)
    running, waiting = figures.column("running"), figures.column("waiting")
    ended = before(end_s)  # a request that ends at a reading is still counted there
    # A request that came during a step is seen after it.
    seen_s = np.concatenate([[-np.inf], [-np.inf], at_s])[:-2]
    wrongs += [
        _worst(
            "running + waiting", running + waiting, "the records' requests", until(begin_s, at_s) - ended, 0
        ),
        _worst(
            "the records' requests", until(begin_s, seen_s) - ended, "running + waiting", running + waiting, 0
        ),
    ]
    if not figures.number("preemptions"):
        inside = until(first_s, at_s) - ended
        wrongs.append(_worst("requests between first and last token", inside, "running", running, 0))
    return first(wrongs)


def pages(figures: Figures) -> str | None:
    """Check that running requests hold their tokens' pages, at most those of prompt and longest answer."""
    other.plain(figures)
    if figures.number("preemptions") or not in_step(figures):
        raise NotCheckable("requests leave their pages, or take them a step ahead")
    size, completed = figures.positive("page_size"), done(figures)
    at_s, held = figures.column("at_s"), figures.column("held_pages")
    least, most = np.zeros(len(at_s)), np.zeros(len(at_s))
    for record in completed:
        begin, begun, end = np.searchsorted(
            at_s, [value(record, name) - SAME_S for name in ("arrival_s", "first_token_s", "finish_s")]
        )
        whole = value(record, "prompt_tokens") + value(record, "max_tokens")
        most[begin : end + 1] += np.ceil(whole / size)
        tokens = np.searchsorted(times_of(record) or [], at_s[begun:end] + SAME_S, side="right")
        least[begun:end] += np.ceil((value(record, "prompt_tokens") + tokens - 1) / size)
    wrongs = [_worst("held_pages", held, "those of the requests there", most, 0)]
    if not figures.column("hit_tokens")[-1]:  # pages may be shared otherwise
        wrongs.append(_worst("the pages of the tokens there", least, "held_pages", held, 0))
    return first(wrongs)


def one_a_step(figures: Figures) -> str | None:
    """Check that no two tokens of a request come at one time, where a step gives a request one token."""
    if figures.number("max_tokens_per_step") != 1:
        raise NotCheckable("a step may give a request several tokens")
    stated = 0
    for record in done(figures):
        if record.get("token_times_s") is None:
            continue
        times_s, stated = np.array(times_of(record)), stated + 1
        if (same := np.flatnonzero(np.diff(times_s) <= 0)).size:
            count = int((times_s == times_s[same[0]]).sum())
            most = f"max_tokens_per_step is 1, so at most one can ({record.get('id')})"
            return f"{count} tokens of a request came at {times_s[same[0]]:g} s, but {most}"
    if not stated:
        raise NotCheckable("token_times_s is absent")
    return None


def pieces_apart(figures: Figures) -> str | None:
    """Check that pieces which a server sent one after the other are not mostly read at one time."""
    if other.server_ratio("itl_s", "itl_count", 1e3)(figures) < LEAST_ITL_MS:
        raise NotCheckable("the server itself sent its tokens at once")
    gaps_s = [
        np.diff(times_of(record) or [])
        for record in figures.records()
        if record.get("finish_reason") in DONE and record.get("piece_times_s") is not None
    ]
    if not gaps_s or not len(every := np.concatenate(gaps_s)):
        raise NotCheckable("there are no gaps between pieces")
    share, what = float((every <= 0).mean()), "the share of pieces that came with the one before"
    return exceeds(what, share, "the most by chance", MOST_TOGETHER, 0)


LAWS = (
    Law("sums of readings", "sums never fall, and fit what was there at each reading", sums, "metrics"),
    Law("computed tokens", "each token is computed once, and what was lost once more", computed, "metrics"),
    Law(
        "steps of requests", "tokens and ends came at steps, as many as each counted", of_requests, "metrics"
    ),
    Law("pages of requests", "who runs holds the pages of its tokens", pages, "metrics"),
    Law("one token a step", "no two tokens of a request come at one time", one_a_step, "records"),
    Law("pieces apart", "pieces came one after the other, as the server sent them", pieces_apart, "metrics"),
)
