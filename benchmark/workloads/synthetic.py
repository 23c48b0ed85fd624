"""Draw the requests of a load from distributions: when they arrive, how long they are, who sends them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recipes.schema.numbers import MOST_COUNT, MOST_TOKENS, RATES_PER_S, real, whole

Draw = Callable[[np.random.Generator, int], NDArray[np.int64]]
# Coefficient of variation of the gaps between arrivals: from a clock to rare, huge bursts.
VARIATIONS = (0.01, 100)
Line = dict[str, Any]
Shares = Mapping[str, float]
MOST_TRACE_TOKENS = 2**28
MOST_SYSTEM_PROMPTS = 10**4
MOST_PRIORITY = 2**31 - 1
LEAST_SHARE = 1e-9
# Each quantity has its own random stream, so that changing one leaves the others.
ARRIVAL, PROMPT, OUTPUT, TOKEN, SYSTEM, TURNS, THINK, TENANT, PRIORITY, ANSWER = range(10)


def lengths(text: str) -> Draw:
    """Parse how to draw lengths: `N`, `uniform:LEAST:MOST` or `lognormal:MEAN:SIGMA`."""
    kind, *values = text.split(":") if ":" in text else ("uniform", text, text)
    try:
        if not text.isascii():
            pass  # int() accepts the digits of any script
        elif kind == "uniform":
            least, most = (int(value) for value in values)
            if 1 <= least <= most <= MOST_TOKENS:
                return lambda random, count: random.integers(least, most, count, endpoint=True)
        elif kind == "lognormal":
            mean, sigma = (float(value) for value in values)
            if 1 <= mean <= MOST_TOKENS and 0 <= sigma < math.inf:
                return lambda random, count: _lognormal(random, count, mean, sigma)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no length; write N, uniform:LEAST:MOST, or lognormal:MEAN:SIGMA, of 1 to {MOST_TOKENS}"
        " tokens"
    )


def _lognormal(random: np.random.Generator, count: int, mean: float, sigma: float) -> NDArray[np.int64]:
    # This distribution has the mean `mean`.
    drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
    if (most := drawn.max(initial=0)) > MOST_TOKENS:
        raise ValueError(
            f"lognormal:{mean:g}:{sigma:g} drew {most:.3g} tokens; {MOST_TOKENS} are the most: lower sigma"
        )
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of arrivals.

    `value`: a gamma's coefficient of variation, a ramp's last rate, a loop's clients.
    """

    kind: Literal["poisson", "gamma", "ramp", "closed"] = "poisson"
    value: float = 1.0

    def times_s(self, random: np.random.Generator, count: int, rate_per_s: float) -> NDArray[np.float64]:
        """Return `count` times in order; raises ValueError for a rate that the process cannot have."""
        if self.kind == "closed" or (self.kind == "poisson" and rate_per_s == math.inf):
            return np.zeros(count)
        if rate_per_s == math.inf:
            raise ValueError(f"--arrivals {self.kind} needs a --rate; with none, all requests come at once")
        if self.kind == "gamma":
            shape = self.value**-2
            return np.cumsum(random.gamma(shape, 1 / (shape * rate_per_s), count))
        due = np.cumsum(random.exponential(1.0, count))  # arrivals of a process of rate 1
        return due / rate_per_s if self.kind == "poisson" else _ramp(due, rate_per_s, self.value)


def _ramp(due: NDArray[np.float64], first_per_s: float, last_per_s: float) -> NDArray[np.float64]:
    """Return when the integral of a linear rate reaches each of `due`; after that the last rate stays."""
    end_s = 2 * len(due) / (first_per_s + last_per_s)
    slope = (last_per_s - first_per_s) / end_s
    within = np.minimum(due, len(due))
    # This form of the root of slope t^2 / 2 + first t = due also holds for a slope of 0.
    times_s = 2 * within / (first_per_s + np.sqrt(np.maximum(0, first_per_s**2 + 2 * slope * within)))
    return times_s + (due - within) / last_per_s


def arrivals(text: str) -> Arrivals:
    """Parse `poisson`, `gamma:CV`, `ramp:LAST_PER_S` or `closed:CLIENTS`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "poisson" and not value:
            return Arrivals()
        if kind == "gamma":
            return Arrivals("gamma", real(*VARIATIONS)(value))
        if kind == "ramp":
            return Arrivals("ramp", real(*RATES_PER_S)(value))
        if kind == "closed":
            return Arrivals("closed", whole(1, MOST_COUNT)(value))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{kind}: {error}") from error
    raise argparse.ArgumentTypeError(
        f"{text!r} is no process of arrivals; write poisson, gamma:CV, ramp:LAST_PER_S or closed:CLIENTS"
    )


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """The distributions of a load. `turns` and `system_prompts` are for sessions; `think_s` is a mean."""

    prompt_tokens: Draw
    output_tokens: Draw
    vocab_size: int
    seed: int = 0
    rate_per_s: float = math.inf
    arrivals: Arrivals = field(default_factory=Arrivals)
    system_prompts: tuple[int, Draw] | None = None
    turns: Draw | None = None
    think_s: float = 0.0
    tenants: Shares | None = None
    priorities: Shares | None = None

    def stream(self, number: int) -> np.random.Generator:
        """Return the random stream of one quantity."""
        return np.random.default_rng([self.seed, number])


def shares(text: str) -> Shares:
    """Parse names and their shares from `NAME=SHARE,NAME=SHARE,...`."""
    parts = [each.partition("=") for each in text.split(",")]
    if not all(name and equals for name, equals, _ in parts) or len({name for name, *_ in parts}) < len(
        parts
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of shares; write NAME=SHARE,..., as in a=3,b=1"
        )
    return {name: real(LEAST_SHARE, 1 / LEAST_SHARE)(share) for name, _, share in parts}


def levels(text: str) -> Shares:
    """Parse priorities and their shares; each name is a whole number."""
    found = shares(text)
    for name in found:
        whole(-MOST_PRIORITY, MOST_PRIORITY)(name)
    return found


def shared_prompts(text: str) -> tuple[int, Draw]:
    """Parse the number and the lengths of system prompts from `COUNT:LENGTHS`."""
    count, _, length = text.partition(":")
    if not length:
        raise argparse.ArgumentTypeError(f"{text!r} is no COUNT:LENGTHS, as in 4:128 or 2:uniform:50:90")
    return whole(1, MOST_SYSTEM_PROMPTS)(count), lengths(length)


def draw_requests(load: SyntheticLoad, count: int) -> list[Line]:
    """Return the trace, one input line of `generate` for each request, in order of arrival."""
    return mark(load, sorted(bounded(_drawn(load, count)), key=lambda line: line["arrival_s"]))


def _drawn(load: SyntheticLoad, count: int) -> Iterator[Line]:
    sizes = _sessions(load, count)
    starts_s = session_starts_s(load, len(sizes), count)
    num_prompt = load.prompt_tokens(load.stream(PROMPT), count).tolist()
    num_output = load.output_tokens(load.stream(OUTPUT), count).tolist()
    token, answer, think = load.stream(TOKEN), load.stream(ANSWER), load.stream(THINK)
    openings = _openings(load, len(sizes))
    number = 0
    for session, size in enumerate(sizes):
        at_s, prompt = float(starts_s[session]), openings[session]
        for turn in range(size):
            prompt = prompt + token.integers(0, load.vocab_size, num_prompt[number]).tolist()
            name = _name(load, number, session, turn)
            yield line_of(name, at_s, {"prompt_token_ids": prompt}, num_output[number])
            at_s += float(think.exponential(load.think_s))
            # The model's answer is not known: random tokens of its length stand in for it.
            if turn + 1 < size:
                prompt = prompt + answer.integers(0, load.vocab_size, num_output[number]).tolist()
            number += 1


def session_starts_s(load: SyntheticLoad, sessions: int, requests: int) -> NDArray[np.float64]:
    """Return when sessions start, so that their requests come at the rates that the load names."""
    if not sessions:
        return np.zeros(0)
    process, share = load.arrivals, sessions / requests
    if process.kind == "ramp":  # its last rate is one of requests, too
        process = replace(process, value=share * process.value)
    return process.times_s(load.stream(ARRIVAL), sessions, share * load.rate_per_s)


def bounded(lines: Iterable[Line]) -> list[Line]:
    """Return all lines; raises ValueError once their prompts hold more than MOST_TRACE_TOKENS."""
    found: list[Line] = []
    num_tokens = 0
    for line in lines:
        num_tokens += len(line["prompt_token_ids"])
        if num_tokens > MOST_TRACE_TOKENS:
            raise ValueError(
                f"the first {len(found) + 1:,} requests have {num_tokens:,} prompt tokens; a trace has"
                f" at most {MOST_TRACE_TOKENS:,}: lower --requests"
            )
        found.append(line)
    return found


def line_of(name: str, arrival_s: float, prompt: Line, max_tokens: int) -> Line:
    """Return one request, answered to its full length."""
    return {
        "id": name,
        "arrival_s": round(arrival_s, 6),
        **prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _name(load: SyntheticLoad, number: int, session: int, turn: int) -> str:
    if load.arrivals.kind == "closed":
        clients = int(load.arrivals.value)
        return f"{number % clients}/{number // clients}"
    return str(number) if load.turns is None else f"{session}/{turn}"


def _sessions(load: SyntheticLoad, count: int) -> list[int]:
    """Return the turns of each session, `count` in all; the last one may be cut."""
    if load.turns is None:
        return [1] * count
    drawn = load.turns(load.stream(TURNS), count)
    whole = int(np.searchsorted(np.cumsum(drawn), count))
    return [*drawn[:whole].tolist(), count - int(drawn[:whole].sum())]


def _openings(load: SyntheticLoad, count: int) -> list[list[int]]:
    """Return how each session begins: with one of the system prompts, if there are any."""
    if load.system_prompts is None:
        return [[] for _ in range(count)]
    random, (num_prompts, length) = load.stream(SYSTEM), load.system_prompts
    texts = [random.integers(0, load.vocab_size, each).tolist() for each in length(random, num_prompts)]
    return [texts[index] for index in random.integers(0, num_prompts, count)]


def mark(load: SyntheticLoad, lines: list[Line]) -> list[Line]:
    """Add tenants and priorities, drawn by their shares; a session keeps its own."""
    sessions = list(dict.fromkeys(line["id"].partition("/")[0] for line in lines))
    for stream, field_name, given in (
        (TENANT, "tenant", load.tenants),
        (PRIORITY, "priority", load.priorities),
    ):
        if given is None:
            continue
        weights = np.array(list(given.values()))
        drawn = load.stream(stream).choice(len(given), len(sessions), p=weights / weights.sum())
        of_session = {session: list(given)[index] for session, index in zip(sessions, drawn.tolist())}
        for line in lines:
            name = of_session[line["id"].partition("/")[0]]
            line[field_name] = int(name) if field_name == "priority" else name
    return lines
