"""The gate refuses what cannot be, passes what can, and assumes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from benchmark.gate.gate import LAWS, audit
from benchmark.gate.sources import rows
from devices.profile import load, named
from tests.simulation.queue import PARTS, honest, summarised

Result = dict[str, Any]
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def scale(*names: str, by: float) -> Callable[[Result], None]:
    """Multiply figures, or all parts of latencies."""

    def tamper(result: Result) -> None:
        for name in names:
            value = result[name]
            parts = {part: each * by for part, each in value.items()} if isinstance(value, dict) else None
            result[name] = value * by if parts is None else parts

    return tamper


def put(**fields: Any) -> Callable[[Result], None]:
    return lambda result: result.update(fields)


def edit(index: int, **fields: Any) -> Callable[[Result], None]:
    return lambda result: result["records"][index].update(fields)


def swap_percentiles(result: Result) -> None:
    told = result["ttft_ms"]
    told["p50"], told["p99"] = told["p99"], told["p50"]


def inflate_tokens(result: Result) -> None:
    result["output_tokens"] *= 3
    result["output_tokens_per_s"] *= 3
    result["total_tokens_per_s"] = (result["prompt_tokens"] + result["output_tokens"]) / result["duration_s"]


def hurry(result: Result) -> None:
    """Half the time, and all rates doubled, so that these agree; nothing is kept to recount."""
    scale("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", by=2)(result)
    result["duration_s"] /= 2
    del result["records"]
    del result["runs_output_tokens_per_s"]


def hide_the_wait(result: Result) -> None:
    """Requests come when their slot is free, in all figures that follow from records."""
    records = [each for each in result["records"] if each["finish_reason"] != "error"]
    for record in records:
        record["arrival_s"] = max(record["arrival_s"], record["first_token_s"] - 0.001)
    result |= summarised(records, list(PARTS)) | {"records": records}


def forget_failures(result: Result) -> None:
    result["records"].append({"id": "late", "finish_reason": "error"})


def drop_the_slowest(result: Result) -> None:
    result["records"].sort(key=lambda each: each.get("finish_s", 0) - each["arrival_s"])
    result["records"] = result["records"][:-4]


def lose_a_token(result: Result) -> None:
    result["records"][3]["token_times_s"].pop()


def turn_back(result: Result) -> None:
    result["records"][3]["token_times_s"].reverse()


def repeat_a_record(result: Result) -> None:
    result["records"][2] = result["records"][1]


def hurry_beside_a_failure(result: Result) -> None:
    """A request has failed, nobody says when, and the rest were ten times as fast."""
    result["records"].append({"id": "bad", "arrival_s": 0.1, "finish_reason": "error"})
    scale("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", by=10)(result)
    result |= {"requests": result["requests"] + 1, "failed": 1, "duration_s": result["duration_s"] / 10}


def move_a_first_token(result: Result) -> None:
    record = max(result["records"], key=lambda each: each["first_token_s"] - each["arrival_s"])
    record["first_token_s"] = record["arrival_s"]


def leave_out(name: str) -> Callable[[Result], None]:
    return lambda result: result["records"][6].pop(name)


def fail_all(result: Result) -> None:
    for record in result["records"]:
        record["finish_reason"] = "error"


TAMPERINGS: dict[str, tuple[Callable[[Result], None], str]] = {
    "more requests a second": (scale("requests_per_s", by=1.3), "rate x duration"),
    "more tokens a second": (scale("output_tokens_per_s", by=1.2), "rate x duration"),
    "more tokens in all a second": (scale("total_tokens_per_s", by=1.2), "rate x duration"),
    "half the time": (hurry, "Little"),
    "faster decode": (scale("tpot_ms", by=0.5), "recount"),
    "smaller gaps": (scale("itl_ms", by=0.5), "E2E = TTFT + gaps"),
    "earlier first token": (scale("ttft_ms", by=0.5), "recount"),
    "earlier end": (scale("e2e_ms", by=0.7), "Little"),
    "swapped percentiles": (swap_percentiles, "percentiles"),
    "a mean below its percentiles": (put(e2e_ms={"mean": 1.0, "p50": 90.0, "p99": 95.0}), "means"),
    "a mean above its maximum": (put(itl_ms={"mean": 50.0, "p50": 9.0, "max": 40.0}), "means"),
    "a failure forgotten": (forget_failures, "every request"),
    "more completed": (scale("completed", by=2), "all counted"),
    "slow requests dropped": (drop_the_slowest, "every request"),
    "a request twice": (repeat_a_record, "every request"),
    "a longer answer": (edit(4, output_tokens=400), "tokens by request"),
    "a token lost": (lose_a_token, "tokens by request"),
    "time runs back": (turn_back, "clock"),
    "an end before the start": (edit(5, finish_s=0.0), "clock"),
    "the wait hidden": (hide_the_wait, "Little"),
    "three times the tokens": (inflate_tokens, "spans"),
    "one slot": (put(slots=1), "at once"),
    "warm-up counted": (put(warm_up_counted=1), "warm-up"),
    "a model that memory cannot give so fast": (put(weight_bytes_per_step=140e9), "roofline"),
    "more served than came": (put(offered_per_s=0.2), "served <= offered"),
    "more came than came": (put(offered_per_s=1000.0), "offered, records"),
    "ten times as fast beside a failure": (hurry_beside_a_failure, "recount"),
    "a first token moved": (move_a_first_token, "clock"),
    "a first token left out": (leave_out("first_token_s"), "whole records"),
    "the tokens' times left out": (leave_out("token_times_s"), "whole records"),
    "all failed": (fail_all, "every request"),
    "one slot, by a preemption": (put(preemptions=1, slots=1), "at once"),
    "more hits than tokens": (put(prefix_hit_rate=3.0), "signs"),
}


def test_fifty_honest_results_pass() -> None:
    verdicts = {seed: audit(honest(seed)) for seed in range(50)}
    assert not {seed: each.describe()["refused"] for seed, each in verdicts.items() if not each.passed}
    checked = {ruling.law.name for each in verdicts.values() for ruling in each.of("pass")}
    always = {law.name for law in LAWS if not law.about} - {"both names"}  # these have one name each
    assert always <= checked, "each law has had its say"


@pytest.mark.parametrize("name", TAMPERINGS)
def test_fifty_tampered_results_are_refused(name: str) -> None:
    tamper, law = TAMPERINGS[name]
    for seed in (101, 204):  # in both, requests wait for slots
        result = honest(seed)
        assert audit(result).passed
        tamper(result)
        refused = audit(result).describe()["refused"]
        assert law in refused, refused


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({"itl_ms": {"min": -1.0, "p50": 2.0}}, "signs"),
        ({"completed": 29}, "samples"),
        ({"completed": 50, "least_samples": 100}, "samples"),
        ({"warm_up_counted": 0, "warm_up_runs": 0}, "warm-up"),
        ({"runs_output_tokens_per_s": [10.0, 11.0, 15.0], "output_tokens_per_s": 15.0}, "median run"),
        ({"ttft_ms": {"p50": 9.0}, "e2e_ms": {"p50": 8.0}}, "TTFT <= E2E"),
        ({"slots": 8, "mean_batch": 8.5}, "slots"),
    ],
)
def test_other_laws_refuse_by_themselves(fields: Result, law: str) -> None:
    assert list(audit(fields).describe()["refused"]) == [law]


def test_fewer_than_none_are_refused() -> None:
    refused = audit({"completed": -5, "requests_per_s": 1.0, "offered_per_s": 2.0}).describe()["refused"]
    assert list(refused) == ["signs", "samples"]


def test_every_impossible_row_of_the_sources_is_refused() -> None:
    found = rows()
    assert {row.source.split()[0] for row in found} == {"article", "engine", "chapter"}
    assert not [row.name for row in found if row.verdict.passed]
    tables = {row.name: {each.law.name for each in row.verdict.of("refused")} for row in found}
    for name in ("static, batch 8", "static, batch 32", "static, batch 64", "continuous"):
        assert "Little, running" in tables[name]
    assert "served <= offered" in tables["continuous"] & tables["chunked prefill"] & tables["whole prefill"]


def test_by_how_much_a_row_breaks_a_law_is_told() -> None:
    continuous = next(row for row in rows() if row.name == "continuous")
    assert "9.64 times" in continuous.verdict.describe()["refused"]["served <= offered"]  # 482 / 50
    assert "90.134" in continuous.verdict.describe()["refused"]["Little, running"]  # 482 x 0.187 s


def test_what_is_absent_is_not_assumed() -> None:
    result = honest(1)
    names = [name for name in result if name != "requests"]
    for name in names:
        less = copy.deepcopy(result)
        del less[name]
        verdict = audit(less)
        assert verdict.passed, (name, verdict.describe()["refused"])
    only = audit({"requests_per_s": 482, "offered_per_s": 500})
    assert {each.law.name for each in only.of("pass")} == {"served <= offered", "signs"}
    assert "duration_s is absent" in only.describe()["not_checkable"].values()


def test_preempted_requests_leave_their_slots() -> None:
    """As many as there were preemptions, and no more."""
    result = honest(1)
    fewer = {"slots": result["slots"] - 2, "mean_batch": 1.0, "mean_running": 1.0}
    for num_preemptions, outcome in ((1, "refused"), (2, "passed")):
        assert "at once" in audit(result | fewer | {"preemptions": num_preemptions}).describe()[outcome]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no law can be checked"),
        ({"machine": "x"}, "no law can be checked"),
        ({"requests_per_s": "fast"}, "requests_per_s is 'fast'; it must be a finite number"),
        ({"requests_per_s": float("nan")}, "must be a finite number"),
        ({"ttft_ms": 5.0}, "which is no object"),
        ({"records": 5}, "records must be a list of objects"),
        ({"completed": 10**400}, "completed is 'an integer that no float holds'"),
        ({"mean_batch": 2, "steps": 9, "output_tokens": 9, "max_tokens_per_step": 0}, "it must be above 0"),
        ({"pages": {"size_tokens": 0, "told": 1}}, "pages.size_tokens is 0; it must be above 0"),
        ({"device_profile": "../x"}, "is no device profile; there are ascend910, ascend910b, ascend910c"),
    ],
)
def test_a_result_that_cannot_be_read_is_unusable(fields: Result, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(fields)


def test_profiles_are_found_by_what_a_device_calls_itself() -> None:
    assert named("NVIDIA H200") == "h200"
    assert named("Ascend910B4") == "ascend910b"
    assert named("Ascend910_9392") == "ascend910c"
    assert named("a stranger") is None
    profile = load("h200")
    assert profile.basis == "assumed"
    assert profile.read_ms(50 * 2**20, 1) == 0, "it may all lie in the cache"
    assert profile.read_ms(50 * 2**20 + 4.8e9, 1) == pytest.approx(1)
    assert profile.read_ms(100 * 2**20 + 9.6e9, 2) == pytest.approx(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"benchmark": "host", "waiting": 3, "slots": {"4": [0]}},
        {"benchmark": "host", "waiting": 3, "slots": {"4": [{"mean_us": 0, "variant": "a"}]}},
        {"benchmark": "device", "steps": [{"is_mixed": True, "step_ms": 1, "parts_ms": 3}]},
        {"benchmark": "stall", "whole": {"worst_itl_ms": 1, "itl_ms": []}, "chunked": {"worst_itl_ms": 0}},
    ],
)
def test_a_field_of_another_kind_is_a_line(fields: dict[str, object]) -> None:
    """Not a traceback: a file may hold anything, anywhere."""
    with pytest.raises(ValueError, match=r"law|must be above 0"):
        audit(fields)
