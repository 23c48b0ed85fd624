"""Results that were really measured pass; whatever is changed in them is refused, alone or in agreement.

Every verb is run here on the tiny model. A fixed sample of all tamperings is audited; THOROUGH=1 audits many
more, of a hundred honest results.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import zlib
from collections import Counter
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmark.gate.alone import ALONE, is_alone
from benchmark.gate.facts import SMALL, digests
from benchmark.gate.gate import ANYWHERE, LAWS, Verdict, audit, laws_for, with_verdict
from benchmark.gate.micro import LAWS as MICRO_LAWS
from benchmark.gate.table import FIGURES
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.benchmark.tampering import Tampering, all_of, recomputed, scale_readings_too
from tests.thorough import THOROUGH, cases

Result = dict[str, Any]
ENGINE = ["recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1"]
NUM_TAMPERINGS = cases(200, 3000)
LEAST_REFUSED = 0.95
SETTINGS = (  # of the engine, and of the trace: tokens of prompts that are the same, and seconds between two
    ([], 0, 0.005),
    (["scheduler.overlap=true", "scheduler.num_slots=4"], 0, 0.0),
    (["cache.num_pages=24", "scheduler.num_slots=6", "scheduler.max_batch_tokens=32"], 0, 0.002),
    (["scheduler.policy=orca", "scheduler.num_slots=3"], 48, 0.001),
    (["scheduler.policy=static", "scheduler.batch_size=4", "scheduler.max_wait_ms=5"], 0, 0.004),
    (["scheduler.policy=prefill_first", "cache.prefix_sharing=false"], 32, 0.0),
)
SMALL_VERBS = {
    "host": ["--slots", "4", "--page-sizes", "16", "--steps", "10", "--chunk", "16"],
    "host, waiting": ["--slots", "4", "--waiting", "3", "--steps", "10"],
    "device": [*ENGINE, "--decode", "2x32", "--prefill", "1x32", "--mixed", "1x32+1x32", "--repeats", "2"],
    "kv": ["--page-sizes", "128", "--repeats", "2", "--requests", "10"],
    "offline, stall": [
        *["--stall", *ENGINE, "--prompt-tokens", "100", "--every", "0.02", "--prompts", "2"],
        *["--answers", "2", "--answer-tokens", "16", "--chunk", "32"],
    ],
}


def trace(path: Path, shared: int, every_s: float, seed: int = 0) -> str:
    """Requests whose prompts and answers differ in length."""
    drawn = random.Random(seed)
    lines = [
        {
            "id": f"r{number}",
            "prompt_token_ids": [7] * shared
            + [drawn.randrange(3, 900) for _ in range(drawn.randrange(5, 60))],
            "max_tokens": drawn.randrange(2, 9),
            "arrival_s": round(number * every_s, 4),
            "temperature": 0,
            "ignore_eos": bool(number % 2),
        }
        for number in range(31)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


class Measured:
    """Runs verbs, and reads what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def told(self, *arguments: str) -> Result:
        with redirect_stdout(StringIO()) as printed:
            main([*arguments, "--json"])
        return json.loads(printed.getvalue())

    def offline(self, number: int, seed: int = 0, runs: int = 1) -> Result:
        overrides, shared, every_s = SETTINGS[number]
        path = trace(self.folder / f"{number}-{seed}.jsonl", shared, every_s, seed)
        return self.told("offline", *ENGINE, *overrides, "--trace", path, "--runs", str(runs))

    def throughput(self, seed: int = 0) -> Result:
        sizes = ("--num-prompts", "31", "--input-len", str(9 + seed % 7), "--output-len", "5")
        return self.told("offline", "--at-once", *ENGINE, *sizes, "--seed", str(seed))

    def latency(self, seed: int = 0) -> Result:
        sizes = ("--batch-size", str(3 + seed % 4), "--input-len", "9", "--output-len", "4")
        counts = ("--num-iters", "10", "--num-iters-warmup", "1", "--seed", str(seed))
        return self.told("offline", "--one-batch", *ENGINE, *sizes, *counts)

    def served(self, seed: int = 0) -> Result:
        path = trace(self.folder / f"served-{seed}.jsonl", 0, 0.004, seed)
        objectives = ("--goodput", "ttft:500000", "tpot:500000")
        with running(Stub(first_s=0.01, gap_s=0.002)) as stub:
            return self.told("serve", "--base-url", stub.url, "--trace", path, *objectives)

    def small(self, name: str) -> Result:
        return self.told(name.split(",")[0], *SMALL_VERBS[name])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def results(measured: Measured) -> list[Result]:
    """Of each verb that people quote."""
    found = [measured.offline(0), measured.offline(3, runs=2), measured.served()]
    return [*found, measured.throughput(), measured.latency()]


@pytest.fixture
def offline(results: list[Result]) -> Result:
    return copy.deepcopy(results[0])


def audited(result: Result) -> Verdict:
    """By all laws but one: a busy machine makes a client late, and it is right to say so."""
    return audit(result, [law for law in laws_for(result) if law.name != "client on time"])


def refused(result: Result) -> Result:
    return audited(result).describe()["refused"]


def is_refused(tampering: Tampering) -> bool:
    """By a law, or because it cannot be read: that ends with a status of its own."""
    try:
        return not audited(tampering.result).passed
    except ValueError:
        return True


def sample(results: list[Result], count: int) -> list[Tampering]:
    """As many of each kind, of all results."""
    drawn, by_kind = random.Random(9), {}
    for result in results:
        for kind, made in all_of(result).items():
            by_kind.setdefault(kind, []).extend(made)
    chosen, left = [], count
    for number, made in enumerate(sorted(by_kind.values(), key=len)):  # what is short leaves more to others
        chosen += drawn.sample(made, min(-(-left // (len(by_kind) - number)), len(made)))
        left = count - len(chosen)
    return chosen


def test_measured_results_pass_and_tampered_ones_do_not(results: list[Result]) -> None:
    assert not [refused(result) for result in results if refused(result)]
    made = sample(results, NUM_TAMPERINGS)
    passed = [each for each in made if not is_refused(each)]
    assert len(made) >= 0.9 * NUM_TAMPERINGS
    assert len(passed) <= (1 - LEAST_REFUSED) * len(made), [(each.kind, each.what) for each in passed]


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_an_honest_result_of_each_setting_passes(measured: Measured, number: int) -> None:
    result = measured.offline(number)
    assert not refused(result)
    assert {"readings", "counters", "settings", "cache", "clocks", "facts"} <= {*result["verdict"]["passed"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_VERBS)
def test_an_honest_result_of_each_small_verb_passes(measured: Measured, name: str) -> None:
    result = measured.small(name)
    assert not refused(result)
    made = sample([result], 40)
    assert not [each.what for each in made if not is_refused(each)]


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="a hundred runs take minutes; THOROUGH=1 makes them")
def test_a_hundred_honest_results_pass(measured: Measured) -> None:
    wrong = Counter()
    for seed in range(10):
        found = [measured.offline(number, seed) for number in range(len(SETTINGS))]
        found += [measured.throughput(seed), measured.latency(seed)]
        found += [measured.served(seed), measured.small("offline, stall")]
        wrong.update(law for result in found for law in refused(result))
    assert not wrong


def single(result: Result, count: int) -> list[Tampering]:
    """Entries of objects dropped, words changed and numbers scaled, one at a time, wherever the file holds a
    second source of what they say. Which of them does not hang on how many readings a run has.
    """
    changes, fields = [], frozenset(result)
    for name, made in all_of(result).items():
        if name in ("a number scaled", "a string relabelled", "an entry dropped"):
            changes += [each for each in made if not is_alone(dotted(each), fields)]
    return sorted(changes, key=lambda each: zlib.crc32(each.what.encode()))[:count]


def dotted(tampering: Tampering) -> str:
    """The field that was changed."""
    return ".".join(map(str, ast.literal_eval(tampering.what.split(" x ")[0])))


def passes_laws(tampering: Tampering) -> bool:
    """Whoever can read the code computes the digests again."""
    tampered = tampering.result
    tampered.pop("verdict", None)
    try:
        return audited({**tampered, "facts": digests(tampered)}).passed
    except ValueError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_laws_alone_refuse_nearly_all_single_changes(results: list[Result], number: int) -> None:
    made = single(results[number], cases(100, 300))
    passed = [each.what for each in made if passes_laws(each)]
    assert len(passed) <= (1 - LEAST_REFUSED) * len(made), passed


def test_what_a_client_writes_is_held_by_laws_alone(results: list[Result]) -> None:
    """Of a result of `serve` every entry that is dropped is missed, and so is a sample of the numbers."""
    served = results[2]
    dropped = [each for each in all_of(served)["an entry dropped"] if not is_alone(dotted(each))]
    passed = [each.what for each in dropped if len(ast.literal_eval(each.what)) == 1 and passes_laws(each)]
    assert not passed
    made = single(served, 60)
    passed = [each.what for each in made if passes_laws(each)]
    assert len(passed) <= 0.1 * len(made), passed


def test_no_field_is_said_to_be_alone_that_is_none(results: list[Result]) -> None:
    """But for those that only another machine, or a server of this project, writes."""
    found = {dotted(each) for result in results for each in all_of(result)["an entry dropped"]}
    elsewhere = ("server.", "machine.torch_npu", "machine.triton")
    unmet = [pattern for pattern in ALONE if not any(fnmatchcase(name, pattern) for name in found)]
    assert not [pattern for pattern in unmet if not pattern.startswith(elsewhere)]


def test_what_a_verb_writes_together_is_there_together(offline: Result) -> None:
    for name in ("clock", "counters", "cache_after_all_runs", "records", "mean_running", "metrics", "facts"):
        fields = {each: value for each, value in offline.items() if each not in (name, "verdict")}
        fields = fields if name == "facts" else {**fields, "facts": digests(fields)}
        assert "whole result" in refused(fields), name
    del offline["counters"]["after"]["steps"]
    assert "alike" in refused(offline)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("scheduler", "policy", "stall_free 2"),
        ("device", "compile", True),
        ("scheduler", "num_slots", None),
    ],
)
def test_settings_are_of_a_recipe(offline: Result, section: str, key: str, value: object) -> None:
    offline["settings"][section][key] = value
    assert "recipe" in refused(offline)


HONEST: tuple[tuple[list[str], dict[str, object]], ...] = (
    (["scheduler.overlap=true", "scheduler.num_slots=2"], {"ignore_eos": False}),
    ([], {"beam_width": 2}),
    (["scheduler.overlap=true"], {"beam_width": 3, "n": 2}),
    ([], {"stop": ["e"]}),
    ([], {"n": 2, "temperature": 1.0}),
    (["scheduler.max_queue_wait_s=0.001", "scheduler.num_slots=2"], {}),
)


@pytest.mark.parametrize(("overrides", "asked"), HONEST)
def test_honest_searches_stops_and_timeouts_pass(
    measured: Measured, tmp_path: Path, overrides: list[str], asked: dict[str, object]
) -> None:
    lines = [
        {"id": f"r{n}", "prompt_token_ids": [5 + n] * 9, "max_tokens": 6, "temperature": 0, **asked}
        for n in range(31)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = measured.told("offline", *ENGINE, *overrides, "--trace", str(path))
    assert {*refused(result)} <= {"samples"}  # of few that were in time
    running = result["metrics"]["columns"].index("running")
    assert max(each[running] for each in result["metrics"]["readings"]) <= result["slots"]


def test_a_ratio_of_stalls_may_be_below_one() -> None:
    """Rounded to two decimals, whatever it is."""
    parts = {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    way = {"itl_ms": parts, "ttft_of_long_prompts_ms": parts, "computed_tokens": 1, "total_tokens_per_s": 1.0}
    result = {
        "benchmark": "stall",
        "clock": {"monotonic_s": 9.0},
        "whole": {**way, "worst_itl_ms": 31.5},
        "chunked": {**way, "worst_itl_ms": 100.0},
        "worst_itl_times_lower": 0.32,
        "throughput_times": 1.0,
    }
    [law] = MICRO_LAWS["stall"]
    assert audit(result, [law]).passed
    assert not audit({**result, "worst_itl_times_lower": 0.33}, [law]).passed


def test_a_ratio_of_rounded_means_may_be_off_by_their_rounding() -> None:
    """A queue that was held up for long: 0.05 of the first mean are much of the ratio."""
    means = {"fifo": 340.04, "sjf": 340.04 * 52.8749}
    rows = [
        {
            "variant": name,
            **dict.fromkeys(("mean_us", "p50_us", "p99_us"), round(mean, 1)),
            "times_the_first": round(mean / means["fifo"], 2),
            "times_us": [round(mean, 1)],
        }
        for name, mean in means.items()
    ]
    result = {"benchmark": "host", "waiting": 3, "clock": {"monotonic_s": 9.0}, "slots": {"4": rows}}
    [law] = MICRO_LAWS["host"]
    assert audit(result, [law]).passed
    rows[1]["times_the_first"] += 0.05
    assert not audit(result, [law]).passed


def test_the_cases_that_a_stranger_found_are_refused(offline: Result) -> None:
    """Each by a law, not by the digests: a forger would compute those again."""
    at_once = [
        {**each, "token_times_s": [each["first_token_s"]] + [each["finish_s"]] * (each["output_tokens"] - 1)}
        for each in offline["records"]
    ]
    waits = [
        {
            **each,
            "arrival_s": round(each["first_token_s"] - 0.6 * (each["first_token_s"] - each["arrival_s"]), 6),
        }
        for each in offline["records"]
    ]
    device = {"machine": {**offline["machine"], "device": "Ascend910B4"}, "device_profile": "ascend910b"}
    cases: dict[str, tuple[Result, set[str]]] = {
        "mean batch": ({"mean_batch": 31.0}, {"readings"}),
        "steps": ({"steps": 38}, {"readings"}),
        "hits": ({"prefix_hit_rate": 0.99}, {"counters"}),
        "pages": ({"mean_page_use": 0.9}, {"readings"}),
        "alias": ({"mean_tpot_ms": 0.5 * offline["tpot_ms"]["mean"]}, {"both names"}),
        "tokens": (recomputed({**offline, "records": at_once}), {"steps of requests"}),
        # Which of both depends on whether all waited alike: then the arrivals keep their spread
        "waits": (recomputed({**offline, "records": waits}), {"offered, records", "readings"}),
        "device": ({**device, "num_devices": 8}, {"machine"}),
    }
    for name, (fields, laws) in cases.items():
        tampered = {**json.loads(json.dumps(offline)), **json.loads(json.dumps(fields))}
        tampered.pop("verdict")
        told = with_verdict(tampered)["verdict"]  # with digests that fit
        assert laws & {*told["refused"]}, (name, told["refused"])


def test_each_refusal_says_both_sources_and_the_tolerance(offline: Result) -> None:
    why = refused({**offline, "mean_batch": 31.0})["readings"]
    assert "mean_batch is 31, but spans / steps (readings) is " in why
    assert "(tolerance 0.006)" in why
    assert "\n" not in why


def test_a_clock_that_the_figures_do_not_know_says_how_long_it_was(offline: Result) -> None:
    """All times of the run are scaled alike, in records, figures and readings, and the digests fit."""
    for factor in (0.5, 0.8, 2.0):
        faster = json.loads(json.dumps({name: each for name, each in offline.items() if name != "verdict"}))
        scale_readings_too(faster, factor)
        told = with_verdict(faster)["verdict"]["refused"]
        assert {"clocks of readings", "clocks", "clocks of requests"} & {*told}, (factor, told)


def test_every_figure_is_held_to_something() -> None:
    names = {law.name for law in (*LAWS, *ANYWHERE)}
    for figure in FIGURES:
        assert figure.ties or figure.laws or figure.alone, f"nothing holds {figure.name}"
        assert not set(figure.laws) - names, f"{figure.name} names a law that there is not"
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    for name in SMALL:
        assert len(laws_for({"benchmark": name})) > len(ANYWHERE)


def test_every_number_of_a_result_is_a_figure_a_fact_or_a_record(offline: Result) -> None:
    """A figure that is added without a row in the table is named here."""
    known = {figure.name for figure in FIGURES} | {alias for figure in FIGURES for alias in figure.aliases}
    told = offline["facts"]
    lists = ("records", "metrics.readings", "runs_")
    unknown = [
        name
        for name, digest in told.items()
        if digest is None and name not in known and not name.startswith((*lists, "clock."))
    ]
    assert not unknown
