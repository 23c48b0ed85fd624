"""Every way to change one number, word or entry of a result, and groups of changes that agree.

A change counts as tampering if it changes what is claimed. It does not if it is smaller than what a figure's
rounding, or a second clock, leaves open (`MEANS`), or if the field claims nothing: a request's id is a name,
and nobody believes the verdict in a file, who can ask the gate again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmark.gate.clocks import READ_S

Result = dict[str, Any]
Path = tuple[str | int, ...]
FACTORS = (0.5, 0.9, 1.1, 2.0, 0.0)
NO_CLAIM = ("verdict", "facts")
MEANS = {"_ms": 0.05, "_us": 0.2, "_s": 5e-4, "share": 5e-3, "rate": 5e-3, "usage": 5e-3}
MEANS |= dict.fromkeys(("first_step_s", "wall_s"), 2 * READ_S)  # by two clocks, apart either way
PARTS = ("mean", "p50", "p90", "p99", "max")  # of a latency, in its unit
MANY = 12  # of the entries of a list that are changed one by one
LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}


@dataclass(frozen=True)
class Tampering:
    """What is done, of which kind it is, and what makes the result of it: a copy of many numbers."""

    kind: str
    what: str
    make: Callable[[], Result]

    @property
    def result(self) -> Result:
        return self.make()


def leaves(value: Any, random: np.random.Generator, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All that is neither an object nor a list, but of long lists some."""
    if isinstance(value, dict):
        for name, each in value.items():
            if path or name not in NO_CLAIM:
                yield from leaves(each, random, (*path, name))
    elif isinstance(value, list):
        chosen = range(len(value))
        if len(value) > MANY:
            chosen = sorted(random.choice(len(value), MANY, replace=False).tolist())
        for at in chosen:
            yield from leaves(value[at], random, (*path, at))
    elif path[-1] != "id":
        yield path, value


def at(result: Result, path: Path) -> Any:
    for each in path:
        result = result[each]  # type: ignore[index]
    return result


def changed(result: Result, path: Path, value: Any) -> Result:
    other = copy.deepcopy(result)
    at(other, path[:-1])[path[-1]] = value
    return other


def name_of(result: Result, path: Path) -> str:
    """The field that a leaf belongs to; of a reading, its column."""
    if "readings" in path and len(path) == 4:
        return str(at(result, (path[0], "columns"))[path[3]])
    names = [each for each in path if isinstance(each, str)]
    return names[-2] if len(names) > 1 and names[-1] in PARTS else names[-1]


def claims(name: str, old: float, new: float) -> bool:
    """Whether a number says something else."""
    most = max(
        [1e-9, *(least for end, least in MEANS.items() if name.endswith(end) or end in name.split("_"))]
    )
    return abs(new - old) > max(most, 0.02 * abs(old))


def numbers(result: Result, random: np.random.Generator) -> Iterator[Tampering]:
    for path, value in leaves(result, random):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        for factor in FACTORS:
            new = type(value)(value * factor)
            if claims(name_of(result, path), value, new):
                yield Tampering("a number scaled", f"{path} x {factor}", partial(changed, result, path, new))


def swaps(result: Result, random: np.random.Generator) -> Iterator[Tampering]:
    """A number takes the place of its neighbour, and the other way round."""
    found = [(p, v) for p, v in leaves(result, random) if type(v) in (int, float)]
    for (one, first), (two, second) in pairwise(found):
        if one[:-1] == two[:-1] and claims(name_of(result, one), first, second):
            make = partial(swapped, result, one, two)
            yield Tampering("numbers swapped", f"{one} and {two}", make)


def swapped(result: Result, one: Path, two: Path) -> Result:
    first, second = at(result, one), at(result, two)
    return changed(changed(result, one, second), two, first)


def words(result: Result, random: np.random.Generator) -> Iterator[Tampering]:
    for path, value in leaves(result, random):
        if isinstance(value, str):
            yield Tampering(
                "a string relabelled", f"{path}", partial(changed, result, path, relabelled(value))
            )


def relabelled(value: str) -> str:
    others = {"length": "stop", "stop": "length", "x86_64": "Ascend910B4", "epyc": "ascend910b", "cpu": "npu"}
    return others.get(value, f"{value} 2" if not value[:1].isdigit() else f"9{value[1:]}")


def dropped(result: Result, path: Path) -> Result:
    other = copy.deepcopy(result)
    del at(other, path[:-1])[path[-1]]
    return other


def doubled(result: Result, path: Path) -> Result:
    other = copy.deepcopy(result)
    at(other, path[:-1]).insert(path[-1], copy.deepcopy(at(other, path)))
    return other


def turned(result: Result, path: Path) -> Result:
    other = copy.deepcopy(result)
    at(other, path).reverse()
    return other


def entries(result: Result, random: np.random.Generator) -> Iterator[Tampering]:
    """Entries of objects dropped; entries of lists dropped, doubled and reordered."""

    def walk(value: Any, path: Path) -> Iterator[Tampering]:
        if isinstance(value, dict):
            for name, each in value.items():
                if (not path and name in NO_CLAIM) or name == "id":
                    continue
                if each is not None:
                    yield Tampering(
                        "an entry dropped", f"{(*path, name)}", partial(dropped, result, (*path, name))
                    )
                yield from walk(each, (*path, name))
        elif isinstance(value, list) and value:
            where = int(random.integers(len(value)))
            one = (*path, where)
            yield Tampering("an entry dropped", f"{one}", partial(dropped, result, one))
            yield Tampering("an entry doubled", f"{one}", partial(doubled, result, one))
            if value[::-1] != value and path != ("records",):  # records may stand in any order
                yield Tampering("entries reordered", f"{path}", partial(turned, result, path))
            yield from walk(value[where], one)

    yield from walk(result, ())


def put_latencies(result: Result, name: str, values_s: list[float]) -> None:
    """A latency's parts, under whichever names the result has."""
    found = 1e3 * np.array(values_s)
    made: dict[str, float] = {"mean": found.mean(), "std": found.std(), "median": np.median(found)}
    made |= {f"p{part}": float(np.percentile(found, part)) for part in (50, 90, 99)}
    for part, value in made.items():
        if part in result.get(name, {}):
            result[name][part] = round(float(value), 3)
        if (theirs := f"{part}_{LATENCIES[name]}_ms") in result:
            result[theirs] = round(float(value), 3)


def recomputed(result: Result) -> Result:
    """All figures that follow from the records."""
    records = [each for each in result["records"] if each["finish_reason"] != "error"]
    times = [each.get("token_times_s", each.get("piece_times_s")) for each in records]
    duration_s = max(each["finish_s"] for each in records) - min(each["arrival_s"] for each in records)
    tokens = [sum(each[name] for each in records) for name in ("prompt_tokens", "output_tokens")]
    put_latencies(result, "ttft_ms", [each["first_token_s"] - each["arrival_s"] for each in records])
    put_latencies(result, "e2e_ms", [each["finish_s"] - each["arrival_s"] for each in records])
    put_latencies(
        result,
        "tpot_ms",
        [(each["finish_s"] - each["first_token_s"]) / max(1, each["output_tokens"] - 1) for each in records],
    )
    put_latencies(result, "itl_ms", [float(gap) for each in times for gap in np.diff(each)])
    stay_s = sum(each["finish_s"] - each["arrival_s"] for each in records)
    made: dict[tuple[str, ...], float] = {
        ("duration_s", "duration", "elapsed_time"): round(duration_s, 6),
        ("requests", "num_prompts", "num_requests"): len(result["records"]),
        ("completed",): len(records),
        ("prompt_tokens", "total_input_tokens"): tokens[0],
        ("output_tokens", "total_output_tokens"): tokens[1],
        ("total_num_tokens",): sum(tokens),
        ("itl_gaps",): sum(len(each) - 1 for each in times),
        ("requests_per_s", "request_throughput", "requests_per_second"): len(records) / duration_s,
        ("output_tokens_per_s", "output_throughput"): tokens[1] / duration_s,
        ("total_tokens_per_s", "total_token_throughput", "tokens_per_second"): sum(tokens) / duration_s,
        ("mean_in_system",): stay_s / duration_s,
        ("mean_in_flight",): stay_s / duration_s,
        ("least_output_tokens",): min(each["output_tokens"] for each in records),
        ("most_output_tokens",): max(each["output_tokens"] for each in records),
        ("asked_output_tokens",): sum(each["max_tokens"] for each in result["records"]),
    }
    for names, value in made.items():
        for name in names:
            if result.get(name) is not None:
                result[name] = round(value, 4)
    if "ended_by" in result:
        reasons = [each["finish_reason"] for each in records]
        result["ended_by"] = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    if "runs_duration_s" in result and len(result["runs_duration_s"]) == 1:
        result["runs_duration_s"] = [result["duration_s"]]
        result["runs_output_tokens"] = [result["output_tokens"]]
        result["runs_output_tokens_per_s"] = [result["output_tokens_per_s"]]
    return result


def move(record: Result, time: Callable[[float], float]) -> None:
    """All times of a record, as a function of what they were."""
    for name in ("arrival_s", "first_token_s", "finish_s", "end_s"):
        if name in record:
            record[name] = round(time(record[name]), 6)
    for name in ("token_times_s", "piece_times_s"):
        if name in record:
            record[name] = [round(time(each), 6) for each in record[name]]


def column(result: Result, name: str, change: Callable[[float], float]) -> None:
    where = result["metrics"]["columns"].index(name)
    for row in result["metrics"]["readings"]:
        row[where] = change(row[where])


def scale_times(result: Result, factor: float) -> None:
    for record in result["records"]:
        move(record, lambda time: time * factor)
    for name in ("offered_per_s",):
        if result.get(name):
            result[name] = round(result[name] / factor, 4)
    recomputed(result)


def scale_readings_too(result: Result, factor: float) -> None:
    scale_times(result, factor)
    column(result, "at_s", lambda time: round(time * factor, 6))
    if "running_s" in result["metrics"]["columns"]:
        column(result, "running_s", lambda time: round(time * factor, 6))


def scale_wall_too(result: Result, factor: float) -> None:
    """All but the run's clock."""
    scale_readings_too(result, factor)
    began_s = result["metrics"]["readings"][0][result["metrics"]["columns"].index("wall_s")]
    column(result, "wall_s", lambda time: round(began_s + (time - began_s) * factor, 6))


def shorten_waits(result: Result, factor: float) -> None:
    """First tokens come earlier, and all that follows them."""
    for record in result["records"]:
        wait_s = record["first_token_s"] - record["arrival_s"]
        arrival_s = record["arrival_s"]
        move(
            record,
            lambda time, less=(1 - factor) * wait_s, came=arrival_s: time - less if time > came else time,
        )
    recomputed(result)


def shorten_first_tokens(result: Result, factor: float) -> None:
    """First tokens come earlier, and the others do not."""
    for record in result["records"]:
        first_s = record["arrival_s"] + factor * (record["first_token_s"] - record["arrival_s"])
        record["first_token_s"] = round(first_s, 6)
        times = record.get("token_times_s", record.get("piece_times_s"))
        times[0] = record["first_token_s"]
        if len(times) == 1:
            record["finish_s"] = times[0]
    recomputed(result)


def at_one_instant(result: Result, factor: float) -> None:
    """All later tokens come with the last."""
    for record in result["records"]:
        times = record.get("token_times_s", record.get("piece_times_s"))
        times[1:] = [times[-1]] * (len(times) - 1)
    recomputed(result)


def arrive_later(result: Result, factor: float) -> None:
    for record in result["records"]:
        wait_s = record["first_token_s"] - record["arrival_s"]
        record["arrival_s"] = round(record["arrival_s"] + (1 - factor) * wait_s, 6)
    recomputed(result)


def drop_slowest(result: Result, factor: float) -> None:
    result["records"].sort(key=lambda each: each["finish_s"] - each["arrival_s"])
    del result["records"][-3:]
    recomputed(result)


def invent_requests(result: Result, factor: float) -> None:
    for number, record in enumerate(copy.deepcopy(result["records"][:5])):
        result["records"].append({**record, "id": f"new {number}"})
    recomputed(result)


def longer_prompts(result: Result, factor: float) -> None:
    for record in result["records"]:
        record["prompt_tokens"] = int(record["prompt_tokens"] / factor)
    recomputed(result)


def another_device(result: Result, factor: float) -> None:
    result["machine"] |= {"device": "Ascend910B4", "torch_npu": "2.9.0"}
    result |= {"device_profile": "ascend910b", "num_devices": 8}
    if "computed_on" in result:
        result["computed_on"] |= {"count": 8, "memory_gib": 64.0}


def rates_of(result: Result, factor: float) -> None:
    """Duration and rates agree, and nothing else knows of them."""
    for name in ("duration_s", "duration", "elapsed_time"):
        if name in result:
            result[name] *= factor
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "requests_per_second")
    for name in (*rates, "tokens_per_second", "request_throughput", "output_throughput"):
        if name in result:
            result[name] /= factor
    if "total_token_throughput" in result:
        result["total_token_throughput"] /= factor


def fuller_batches(result: Result, factor: float) -> None:
    result["mean_batch"] = round(result["mean_batch"] / factor, 2)
    result["steps"] = int(result["steps"] * factor)


def hits(result: Result, factor: float) -> None:
    """The rate and the readings say so, and the counters, the cache and the records do not."""
    result["prefix_hit_rate"] = 0.9
    if "hit_tokens" in result["metrics"]["columns"]:
        total = result["prompt_tokens"]
        column(result, "hit_tokens", lambda _: int(0.9 * total))


def page_use(result: Result, factor: float) -> None:
    result["mean_page_use"] = round(result["mean_page_use"] / factor, 4)
    column(result, "kv_usage", lambda share: share / factor)
    for name in ("held_pages", "page_steps"):
        if name in result["metrics"]["columns"]:
            column(result, name, lambda count: int(count / factor))


def more_slots(result: Result, factor: float) -> None:
    result["slots"] = int(result["slots"] / factor)


def batches_of(result: Result, factor: float) -> None:
    """Every time of every batch."""
    result["latencies"] = [round(each * factor, 6) for each in result["latencies"]]
    result["avg_latency"] = round(result["avg_latency"] * factor, 6)
    result["percentiles"] = {part: round(each * factor, 6) for part, each in result["percentiles"].items()}
    result["duration_s"] = round(result["duration_s"] * factor, 6)
    result["output_tokens_per_s"] = round(result["output_tokens_per_s"] / factor, 2)
    result["tpot_ms"]["mean"] = round(result["tpot_ms"]["mean"] * factor, 3)
    columns = result.get("batches", {}).get("columns", [])
    for row in result.get("batches", {}).get("readings", []):
        for name in ("latency_s", "first_step_s", "ttft_ms", "tpot_ms", "e2e_ms"):
            row[columns.index(name)] *= factor


def server_too(result: Result, factor: float) -> None:
    """The times of the records, and what the server said of them."""
    scale_readings_too(result, factor)
    before, after = (result["metrics"].get(name, {}) for name in ("before", "after"))
    for name in ("ttft_s", "e2e_s", "queue_s", "prefill_s"):
        if name in after:
            after[name] = before[name] + factor * (after[name] - before[name])


def with_alias(result: Result, factor: float) -> None:
    result["mean_tpot_ms"] = round(factor * result["tpot_ms"]["mean"], 3)


RECORDED: tuple[Callable[[Result, float], None], ...] = (
    *(scale_times, scale_readings_too, shorten_waits, shorten_first_tokens, at_one_instant, arrive_later),
    *(drop_slowest, invent_requests, longer_prompts, rates_of, hits),
)
OFFLINE = (*RECORDED, scale_wall_too, fuller_batches, page_use, more_slots, with_alias, another_device)
SERVED = (*RECORDED, server_too, scale_wall_too)
BATCHES = (batches_of, rates_of, with_alias, another_device)
FOLLOWERS = (at_one_instant, drop_slowest, invent_requests, hits, another_device)  # know no factor


def groups(result: Result) -> Iterator[Tampering]:
    """Changes that agree with one another."""
    acts = SERVED if result.get("benchmark") == "serve" else OFFLINE if "records" in result else BATCHES
    for act in acts if "output_tokens_per_s" in result or "output_throughput" in result else ():
        for factor in (0.6,) if act in FOLLOWERS else (0.5, 0.6, 0.8, 0.9):
            other = copy.deepcopy(result)
            try:
                act(other, factor)
            except (KeyError, ValueError):
                continue  # the result has no such field
            if other != result:
                yield Tampering(
                    "a group that agrees", f"{act.__name__} x {factor}", partial(copy.copy, other)
                )


def all_of(result: Result, seed: int = 0) -> dict[str, list[Tampering]]:
    """Every tampering of a result, by kind."""
    random = np.random.default_rng(seed)
    made: dict[str, list[Tampering]] = {}
    for way in (numbers, swaps, words, entries):
        for each in way(result, random):
            made.setdefault(each.kind, []).append(each)
    made["a group that agrees"] = list(groups(result))
    return made
