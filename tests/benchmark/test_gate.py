"""The gate passes what can be, refuses what cannot, and assumes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmark.gate.gate import ANYWHERE, LAWS, audit, digests, published, with_verdict
from benchmark.gate.law import Law, Tie
from benchmark.gate.result import Figures, NotCheckable
from benchmark.gate.table import TIED, under_ours
from devices.rates import load, named
from tests.benchmark.gate_results import claim, client, engine
from tests.each_of import each_of
from tests.simulation.queue import PARTS, honest, summarised

Result = dict[str, Any]
Tampering = Callable[[Result], object]
GOOD = {
    **{each.__name__: each() for each in (engine, client)},
    **{kind: claim(kind, 3.0) for kind in ("is", "at_most", "at_least")},
}


def refused(result: Result) -> dict[str, str]:
    return audit(result)["refused"]


def put(path: str, value: object) -> Tampering:
    """Change a field, by its dotted name, or leave it out."""

    def tamper(result: Any) -> None:
        *way, last = path.split(".")
        for part in way:
            result = result[int(part) if isinstance(result, list) else part]
        last = int(last) if isinstance(result, list) else last
        if value is None:
            del result[last]
        else:
            result[last] = value

    return tamper


def scale(*names: str, by: float) -> Tampering:
    """Multiply figures, or all parts of latencies."""

    def tamper(result: Result) -> None:
        for name in names:
            value = result[name]
            parts = {part: each * by for part, each in value.items()} if isinstance(value, dict) else None
            result[name] = value * by if parts is None else parts

    return tamper


def hurry(result: Result) -> None:
    """Half the time, and all rates doubled, so that these agree; nothing is kept to recount."""
    scale("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", by=2)(result)
    result["duration_s"] /= 2
    del result["records"], result["runs_output_tokens_per_s"]


def hide_the_wait(result: Result) -> None:
    """Requests come when their slot is free, in all figures that follow from records."""
    for record in result["records"]:
        record["arrival_s"] = max(record["arrival_s"], record["first_token_s"] - 0.001)
    result |= summarised(result["records"], list(PARTS))


def inflate_tokens(result: Result) -> None:
    scale("output_tokens", "output_tokens_per_s", by=3)(result)
    result["total_tokens_per_s"] = (result["prompt_tokens"] + result["output_tokens"]) / result["duration_s"]


def drop_the_slowest(result: Result) -> None:
    result["records"].sort(key=lambda each: each["finish_s"] - each["arrival_s"])
    del result["records"][-4:]


def hurry_beside_a_failure(result: Result) -> None:
    """A request has failed, nobody says when, and the rest were ten times as fast."""
    result["records"].append({"id": "bad", "arrival_s": 0.1, "finish_reason": "error"})
    scale("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", by=10)(result)
    result |= {"requests": result["requests"] + 1, "failed": 1, "duration_s": result["duration_s"] / 10}


def all_of(*acts: Tampering) -> Tampering:
    """Change several fields."""
    return lambda result: [act(result) for act in acts]


def skip_tokens(result: Result) -> None:
    """Fewer tokens were computed than there were, as if some had been found and nobody told."""
    result["counters"]["after"]["computed_tokens"] -= 7


def at_one_instant(result: Result) -> None:
    times_s = max((record["token_times_s"] for record in result["records"]), key=len)
    times_s[1:-1] = [times_s[-1]] * (len(times_s) - 2)


def together(result: Result) -> None:
    for record in result["records"]:
        times_s = record["piece_times_s"]
        record["piece_times_s"] = [times_s[0], *[times_s[-1]] * (len(times_s) - 1)]


def refuse_drafts(result: Result) -> None:
    """Of 9 drafts none was accepted, and one was computed that nobody counted."""
    result["counters"]["before"]["draft_tokens"], result["counters"]["after"]["draft_tokens"] = 1, 10
    result["counters"]["after"]["computed_tokens"] += 10


ON_ASCEND = put("machine.device", "Ascend910B4")
ON_CPU = all_of(put("machine.device", "x86_64"), put("computed_on.kind", "cpu"), put("device_profile", None))
# A law, a result that it passes, and a tampering that it refuses.
TAMPERINGS: tuple[tuple[str, str, Tampering], ...] = (
    ("signs", "engine", put("mean_batch", -1.0)),
    ("signs", "engine", all_of(put("failed", -2), put("completed", 42))),
    ("goodput", "client", put("good_share", 1.0)),
    ("both names", "client", put("p50_ttft_ms", 0.1)),
    ("samples", "engine", put("completed", 29)),
    ("warm-up", "engine", put("warm_up_counted", 1)),
    ("whole records", "engine", put("records.6.first_token_s", None)),
    ("clock", "engine", lambda result: result["records"][3]["token_times_s"].reverse()),
    ("clock", "engine", put("records.5.finish_s", 0.0)),
    ("clock", "client", put("records.5.end_s", 0.0)),
    ("tokens by request", "engine", lambda result: result["records"][3]["token_times_s"].pop()),
    ("tokens by request", "engine", put("records.4.max_tokens", 1)),
    ("tokens by request", "client", put("records.3.piece_tokens", [1, 2])),
    ("clock", "engine", at_one_instant),
    ("pieces apart", "client", together),
    ("computed tokens", "engine", put("counters.after.refound_tokens", 7)),
    ("computed tokens", "engine", put("counters.after.computed_tokens", 7)),
    ("computed tokens", "engine", skip_tokens),
    ("computed tokens", "engine", refuse_drafts),
    ("counters grow", "engine", put("counters.before.steps", 10_000)),
    ("counters grow", "client", put("metrics.before.itl_count", 10_000)),
    ("client on time", "client", put("client.lag_ms.p99", 900.0)),
    ("client on time", "client", all_of(put("offered_per_s", None), put("client.late_ms.p99", 900.0))),
    ("clocks", "engine", put("clock.monotonic_s", 90.0)),
    ("clocks", "engine", put("clock.cpu_s", 500.0)),
    ("clocks", "engine", put("duration_s", 101.0)),
    ("machine", "engine", put("machine.device", "Ascend910B4")),
    ("machine", "engine", put("computed_on.kind", "cpu")),
    ("machine", "engine", put("device_profile", "ascend910b")),
    ("machine", "engine", all_of(ON_ASCEND, put("computed_on.kind", "npu"))),
    ("machine", "engine", all_of(ON_CPU, put("num_devices", 8))),
    # Changes that agree with others, and changes of single ties that are easily made.
    ("Little", "engine", hurry),
    ("Little", "engine", hide_the_wait),
    ("spans", "engine", inflate_tokens),
    ("recount", "engine", drop_the_slowest),
    ("recount", "engine", lambda result: result["records"].append({"id": "late"})),
    (
        "recount",
        "engine",
        lambda result: result["records"].insert(2, result["records"].pop(1) | {"id": "0"}),
    ),
    ("recount", "engine", hurry_beside_a_failure),
    ("recount", "engine", scale("tpot_ms", by=0.5)),
    ("recount", "client", lambda result: result["records"][3]["piece_times_s"].pop(1)),
    ("E2E = TTFT + gaps", "engine", scale("itl_ms", by=0.5)),
    ("E2E = TTFT + gaps", "client", put("itl_gaps", 5)),
    ("Little, running", "engine", scale("mean_running", by=0.8)),
    ("percentiles", "engine", put("ttft_ms.p50", 1e6)),
    ("roofline", "engine", put("weight_bytes_per_step", 140e9)),
    ("at once", "engine", put("slots", 1)),
)


@each_of("law, good, tamper", TAMPERINGS)
def test_a_law_refuses_a_tampered_result(law: str, good: str, tamper: Tampering) -> None:
    assert law in audit(GOOD[good])["passed"]
    tampered = copy.deepcopy(GOOD[good])
    tamper(tampered)
    assert law in refused(tampered)


@pytest.mark.parametrize(
    ("law", "good", "change"),
    [
        ("Little, running", "engine", all_of(put("preemptions", 1), put("mean_running", 0.1))),
        ("clock", "engine", all_of(put("max_tokens_per_step", 4), at_one_instant)),
        ("computed tokens", "engine", all_of(refuse_drafts, put("counters.before.draft_tokens", 0))),
        ("pieces apart", "client", all_of(put("metrics.after.itl_s", 0.031), together)),
        ("machine", "engine", all_of(ON_ASCEND, put("computed_on.virtual", True))),
        ("machine", "engine", ON_CPU),
        ("server", "client", all_of(put("metrics.after.requests", 99), put("metrics.after.ttft_s", 1e6))),
        ("counters", "engine", all_of(put("records.0.token_times_s", None), put("steps", 1))),
    ],
)
def test_a_law_is_silent_where_it_does_not_apply(law: str, good: str, change: Tampering) -> None:
    changed = copy.deepcopy(GOOD[good])
    change(changed)
    assert law not in refused(changed)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_result_passes(name: str) -> None:
    assert not refused(GOOD[name])


def test_each_law_has_a_tampering() -> None:
    tried = {law for law, _, _ in TAMPERINGS} | {law.name for law in TIED} | {"digests"}
    assert {law.name for law in (*LAWS, *ANYWHERE)} == tried


def wrong(tie: Tie, result: Result, figure: float | None = None) -> str | None:
    """What a tie says of a result, if it has another figure."""
    figures = Figures(under_ours(result))
    if figure is not None:
        fields: Any = copy.deepcopy(figures.fields)
        put(tie.figure, figure)(fields)
        figures = Figures(fields)
    return tie(figures)


@pytest.mark.parametrize("law", TIED, ids=lambda law: law.name)
def test_each_tie_of_a_law_refuses_another_figure(law: Law) -> None:
    """Some good result has both numbers, and a thousand times the figure, or none of it, is refused."""
    unmet = {check: None for check in law.checks if isinstance(check, Tie)}
    for result in GOOD.values():
        for tie in list(unmet):
            try:
                law.when(Figures(under_ours(result)))
                assert wrong(tie, result) is None
            except NotCheckable:
                continue
            stated = Figures(under_ours(result)).number(tie.figure)
            assert wrong(tie, result, 0.0 if tie.kind == "at least" else 1000 * stated + 1000), tie
            del unmet[tie]
    assert not unmet


def test_fifty_honest_results_pass() -> None:
    assert not {seed: wrongs for seed in range(50) if (wrongs := refused(honest(seed)))}


def test_each_changed_field_is_refused_by_its_digest() -> None:
    result = with_verdict(engine())
    assert result["verdict"]["outcome"] == "pass"
    assert refused(json.loads(json.dumps(result))) == {}
    for name in result.keys() - {"verdict", "digests"}:
        for changed in (
            {**result, name: [result[name]]},
            {each: result[each] for each in result if each != name},
        ):
            digest_law = [law for law in ANYWHERE if law.name == "digests"]
            assert audit(changed, digest_law)["refused"] == {"digests": f"{name} was changed"}
    assert "more was changed" in refused({**result, "more": 1})["digests"]


def test_a_field_is_a_fact_whatever_its_order() -> None:
    assert digests({"a": {"x": 1, "y": (2.5, None)}}) == digests({"a": {"y": [2.5, None], "x": 1}})


def test_every_published_row_is_refused() -> None:
    found = {row.name: row.verdict["refused"] for row in published()}
    assert not [name for name, wrongs in found.items() if not wrongs]
    for name in ("static, batch 8", "static, batch 32", "static, batch 64", "continuous"):
        assert "Little, running" in found[name]
    assert "9.64 times" in found["continuous"]["served <= offered"]  # 482 / 50
    assert "90.134" in found["continuous"]["Little, running"]  # 482 x 0.187 s


def test_what_is_absent_is_not_assumed() -> None:
    result = honest(1)
    for name in result.keys() - {"requests"}:
        assert not refused({each: value for each, value in result.items() if each != name}), name
    only = audit({"requests_per_s": 482, "offered_per_s": 500})
    assert {*only["passed"]} == {"served <= offered", "signs"}
    assert "completed is absent" in only["not_checkable"].values()


def test_nobody_who_asked_was_late() -> None:
    nobody = {"records": [], "requests": 0, "completed": 0, "failed": 0, "duration_s": 1.0}
    assert list(refused({**nobody, "requests_per_s": 0.0, "offered_per_s": 0.0})) == ["samples"]


def test_preempted_requests_leave_their_slots() -> None:
    """As many as there were preemptions, and no more."""
    result = honest(1)
    fewer = {"slots": result["slots"] - 2, "mean_batch": 1.0, "mean_running": 1.0}
    for num_preemptions, outcome in ((1, "refused"), (2, "passed")):
        assert "at once" in audit(result | fewer | {"preemptions": num_preemptions})[outcome]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no law can be checked"),
        ({"machine": "x"}, "no law can be checked"),
        ({"requests_per_s": "fast"}, "requests_per_s is 'fast'; it must be a finite number"),
        ({"requests_per_s": float("nan")}, "must be a finite number"),
        ({"ttft_ms": 5.0}, "which is no object"),
        ({"records": 5}, "records must be a list of objects"),
        ({"records": [{"finish_reason": "stop", "piece_times_s": 5}]}, "a time of request None: 5 is given"),
        ({"completed": 10**400}, "completed is 'an integer that no float holds'"),
        (
            {"output_tokens_per_s": 1, "runs_output_tokens_per_s": ["fast"]},
            "an entry of runs_output_tokens_per_s is 'fast'; it must be a finite number",
        ),
        ({"output_tokens_per_s": 1, "runs_output_tokens_per_s": []}, "it must be a list of numbers"),
        ({"device_profile": "../x"}, "is no device profile; there are ascend910, ascend910b, ascend910c"),
        ({**client(), "goodput": {"e2e": 5}}, "goodput.e2e is no objective; there are ttft, tpot, itl, e2el"),
        ({**engine(), "clock": {"started_at": "now", "ended_at": "then"}}, "it must be a date and a time"),
        (
            {"metrics": {"before": {"a": []}, "after": {"a": 1}}, "benchmark": "serve"},
            "must be a finite number",
        ),
        ({**engine(), "num_devices": 0}, "num_devices is 0; it must be above 0"),
        (
            {**engine(), "clock": {"started_at": "2026-01-01", "ended_at": "2026-01-01"}},
            "it must be a date and a time with its zone",
        ),
    ],
)
def test_a_result_that_cannot_be_read_is_unusable(fields: Result, message: str) -> None:
    """By one line, not a traceback: a file may hold anything, anywhere."""
    with pytest.raises(ValueError, match=message):
        audit(fields)


def test_a_file_of_vllm_is_audited() -> None:
    """Its names, and no records; the gaps of its ITL are between pieces, and not told."""
    told = {"duration": 10.0, "completed": 100, "failed": 0, "num_prompts": 100, "request_rate": "inf"}
    told |= {"total_input_tokens": 1000, "total_output_tokens": 5000, "request_throughput": 10.0}
    told |= {"output_throughput": 500.0, "total_token_throughput": 600.0, "mean_ttft_ms": 50.0}
    told |= {"median_ttft_ms": 45.0, "p99_ttft_ms": 90.0, "mean_itl_ms": 40.0}
    assert not refused(told)
    assert list(refused({**told, "request_throughput": 48.2})) == ["rate x duration"]
    told |= {"itls": [[0.04]] * 100, "mean_e2el_ms": 90.0}
    assert not refused(told)
    assert list(refused({**told, "mean_itl_ms": 80.0})) == ["E2E = TTFT + gaps"]


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
