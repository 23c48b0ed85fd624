"""Define the laws of single requests and of single steps, which no figure of a whole run shows.

A record's times are in order, and its tokens are those that were asked for. A reading has what was there at
the end of a step, and what was counted from the start of the run up to then.
"""

from __future__ import annotations

import numpy as np

from benchmark.gate.law import Law, differs, exceeds, first
from benchmark.gate.recount import growth, plain, server_growth
from benchmark.gate.result import Fields, Figures, NotCheckable, finite, of_each, times_of, value_of

NEEDED = ("arrival_s", "first_token_s", "finish_s", "output_tokens")  # fields of each completed record
SHOWN = 3  # number of requests that a message names
SAME_S = 5e-6  # tolerance between two entries of one time, in microseconds
LEAST_ITL_MS = 1.0  # the least ITL at which a client can tell a server's tokens apart
MOST_TOGETHER = 0.75  # share of all pieces that a client on a busy machine may read at one time


def _named(wrongs: list[str]) -> str | None:
    shown = "; ".join(wrongs[:SHOWN])
    return f"{shown}; and {len(wrongs) - SHOWN} more" if len(wrongs) > SHOWN else shown or None


def whole(figures: Figures) -> str | None:
    """Require all times of completed records, without which they cannot be recounted."""
    has_tokens = any(times_of(record) is not None for record in figures.completed)
    wrongs = [
        f"request {record.get('id')} has no {name}"
        for record in figures.completed
        for name in NEEDED
        if record.get(name) is None
    ]
    wrongs += [
        f"request {record.get('id')} has no times of its tokens"
        for record in figures.completed
        if has_tokens and times_of(record) is None
    ]
    return _named(wrongs)


def clock(figures: Figures) -> str | None:
    """Check that arrival, first token and end are in order, and that tokens lie between first and end."""
    wrongs = []
    for record in figures.completed:
        who, tokens_s = f"request {record.get('id')}", times_of(record) or []
        times_s = [value_of(record, name) for name in NEEDED[:3]]
        if times_s != sorted(times_s) or tokens_s != sorted(tokens_s):
            wrongs.append(f"{who} goes back in time: {times_s}")
        elif tokens_s and max(abs(tokens_s[0] - times_s[1]), abs(tokens_s[-1] - times_s[2])) > SAME_S:
            wrongs.append(
                f"{who} has tokens between {tokens_s[0]:g} and {tokens_s[-1]:g} s, not {times_s[1:]}"
            )
        if record.get("end_s") is not None and value_of(record, "end_s") < times_s[2] - SAME_S:
            wrongs.append(f"{who} has tokens after its connection ended")
    return _named(wrongs)


def tokens(figures: Figures) -> str | None:
    """Check that answers have the tokens asked for, or stopped earlier, and as many times."""
    wrongs = [wrong for record in figures.completed if (wrong := _tokens_of(record))]
    return _named(wrongs)


def _tokens_of(record: Fields) -> str | None:
    who, reason = f"request {record.get('id')}", record["finish_reason"]
    given, most = value_of(record, "output_tokens"), value_of(record, "max_tokens")
    is_short = reason == "length" and given != most
    if not 1 <= given <= most or is_short or value_of(record, "prompt_tokens") < 1:
        return f"{who} has {given:g} tokens, {most:g} asked for, ended by {reason}"
    times, pieces = record.get("token_times_s"), record.get("piece_tokens")
    if times is not None and len(times) != given:
        return f"{who} has {given:g} tokens at {len(times)} times"
    if pieces is not None and (sum(pieces) != given or len(pieces) != len(record.get("piece_times_s") or [])):
        return f"{who} has {given:g} tokens, and {sum(pieces):g} in pieces"
    return None


def one_a_step(figures: Figures) -> str | None:
    """Check that no two tokens of a request come at one time, where a step gives a request one token."""
    if figures.number("max_tokens_per_step") != 1:
        raise NotCheckable("a step may give a request several tokens")
    if not (timed := [each for each in figures.completed if each.get("token_times_s") is not None]):
        raise NotCheckable("token_times_s is absent")
    wrongs = [
        f"two tokens of request {record.get('id')} came at {times_s[1:][same][0]:g} s, in one step"
        for record in timed
        if (same := np.diff(times_s := np.array(times_of(record))) <= 0).any()
    ]
    return _named(wrongs)


def pieces_apart(figures: Figures) -> str | None:
    """Check that pieces which a server sent one after the other are not mostly read at one time."""
    grown_s, count = server_growth("itl_s")(figures), server_growth("itl_count")(figures)
    if 1e3 * grown_s < LEAST_ITL_MS * max(1.0, count):
        raise NotCheckable("the server itself sent its tokens at once")
    gaps_ms = figures.latencies_ms.get("itl_ms")
    if gaps_ms is None or not len(gaps_ms):
        raise NotCheckable("there are no gaps between pieces")
    share, what = float((gaps_ms <= 0).mean()), "the share of pieces that came with the one before"
    return exceeds(what, share, "the most by chance", MOST_TOGETHER)


def computed(figures: Figures) -> str | None:
    """Check that each token is computed once, and lost tokens once more.

    Computed are the tokens of prompts that were not hits, sampled tokens except an answer's last, and what
    preemption lost and did not find again.
    """
    plain(figures)
    counted, hits = (float(figures.column(name)[-1]) for name in ("tokens", "hit_tokens"))
    expected = figures.number("prompt_tokens") - hits
    expected += figures.number("output_tokens") - figures.number("completed")
    expected += growth("lost_tokens")(figures) - growth("refound_tokens")(figures)
    # A stopped answer may have had one more token computed where the next step had begun.
    ahead = figures.number("completed") if figures.raw("settings.scheduler.overlap") else 0.0
    all_tokens, what = "the tokens of all steps", "prompt_tokens - hits + output_tokens - completed + lost"
    return first(
        [
            differs(all_tokens, counted, "computed_tokens (counters)", growth("computed_tokens")(figures)),
            exceeds(what, expected, all_tokens, counted),
            exceeds(all_tokens, counted, what, expected, ahead),
        ]
    )


def at_steps(figures: Figures) -> str | None:
    """Check that tokens and requests' ends came at the ends of steps, as many as each reading counted."""
    plain(figures)
    at_s = figures.column("at_s")
    came_s = np.sort(np.concatenate([np.array(times_of(each) or []) for each in figures.completed]))
    ended_s = np.sort(of_each(figures.completed, "finish_s"))
    wrongs: list[str | None] = []
    for name, times_s in (("sampled", came_s), ("ended", ended_s)):
        by_then = np.searchsorted(times_s, at_s + SAME_S, side="right")
        if (off := np.flatnonzero(figures.column(name) != by_then)).size:
            at, counted = int(off[0]), figures.column(name)
            what, records = f"{name} at reading {at + 1}", "the records' number by then"
            wrongs.append(differs(what, float(counted[at]), records, float(by_then[at])))
    return first(wrongs)


def counters(figures: Figures) -> str | None:
    """Check that the counters of an engine or a server only grow: one that was started again counts anew."""
    place = "metrics" if figures.raw("benchmark") == "serve" else "counters"
    before, after = figures.raw(f"{place}.before"), figures.raw(f"{place}.after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise NotCheckable("counters are absent")
    wrongs = [
        exceeds(f"{name} before", finite(name, before[name]), "after", finite(name, after[name]))
        for name in before.keys() & after.keys()
    ]
    return first(wrongs)


LAWS = (
    Law("whole records", "completed ones have their times; of their tokens all, or none", whole),
    Law("clock", "arrival <= first token <= end, as its tokens say", clock),
    Law("tokens by request", "each answer has the tokens that were asked for", tokens),
    Law("one token a step", "no two tokens of a request come at one time", one_a_step, "records"),
    Law("pieces apart", "pieces came one after the other, as the server sent them", pieces_apart, "metrics"),
    Law("computed tokens", "each token is computed once, and what was lost once more", computed, "metrics"),
    Law("steps of requests", "tokens and ends came at steps, as many as each counted", at_steps, "metrics"),
    Law("counters grow", "the counters of an engine or a server only grow", counters),
)
