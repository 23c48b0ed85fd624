"""A simulated engine keeps time as its cost model says, and counts what a recount finds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmark.gate.gate import audit
from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from devices.rates import DeviceRates
from kv_cache.pages import PageCopy
from models.checkpoint.huggingface import decoder_config
from models.config import layer_specs
from models.cost import ModelPart
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection
from serving.text.request_fields import parse_request
from simulation import trace
from simulation.replica import serve
from simulation.roofline import Roofline
from simulation.run_totals import Sketch, rounded
from tests.thorough import first_quick

LLAMA_7B = decoder_config(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "dtype": "float16",
    },
    "llama",
    layers=layer_specs((None,) * 32),
)


class Fixed:
    """A step takes 10 ms and 1 ms a token."""

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        return 0.010 + 0.001 * batch.num_tokens


def scheduler(num_pages: int = 400, depth: int = 1, **changes: object) -> Scheduler:
    asked = replace(SchedulerSection(num_slots=4, max_batch_tokens=32), **changes)
    limits = SchedulerLimits(num_pages, 0, 200, 1000, (2,), None)
    return scheduler_of(asked, CacheSection(num_pages=num_pages, page_size=8), limits, depth=depth)


def requests(count: int, rate: float, seed: int = 0) -> Iterator[Request]:
    random, at_s = np.random.default_rng(seed), 0.0
    for number in range(count):
        at_s += random.exponential(1 / rate)
        prompt, params = random.integers(0, 1000, int(random.integers(1, 60))), int(random.integers(1, 40))
        yield Request(str(number), prompt, SamplingParams(max_tokens=params, ignore_eos=True), arrival_s=at_s)


def test_one_request_takes_its_steps() -> None:
    request = Request("a", np.arange(40), SamplingParams(max_tokens=3, ignore_eos=True), arrival_s=5.0)
    figures = serve([request], scheduler(), Fixed()).figures()
    assert figures["ttft_ms"]["mean"] == pytest.approx(10 + 32 + 10 + 8)  # the prompt in two chunks
    assert figures["itl_ms"]["mean"] == pytest.approx(11)
    assert figures["duration_s"] == pytest.approx(0.060 + 2 * 0.011)
    assert (figures["output_tokens"], figures["steps"]) == (3, 4)


@pytest.mark.parametrize(("num_pages", "overlap"), first_quick(1, [(400, False), (400, True), (20, False)]))
def test_figures_are_those_of_all_tokens(num_pages: int, overlap: bool) -> None:
    times_s: dict[str, list[float]] = {}

    def observe(engine: Engine, step: Step) -> None:
        for row in step.owners.tolist():
            times_s.setdefault(engine.slots.requests[row].id, []).append(step.end_s)

    totals = serve(
        requests(300, 5.0), scheduler(num_pages), Fixed(), overlap=overlap, keep_records=True, observe=observe
    )
    figures, records = totals.figures(), totals.records
    assert records is not None
    assert figures["completed"] == len(records) == 300
    assert (figures["preemptions"] > 0) == (num_pages == 20)
    for each in records:  # the device may compute a token too many while the host does not know
        del times_s[each["id"]][each["output_tokens"] :]
    gaps_ms = 1e3 * np.concatenate([np.diff(each) for each in times_s.values()])
    ttft_ms = 1e3 * np.array([each["first_token_s"] - each["arrival_s"] for each in records])
    for name, found in (("itl_ms", gaps_ms), ("ttft_ms", ttft_ms)):
        told = figures[name]
        assert told["mean"] == pytest.approx(found.mean(), rel=1e-3)
        wanted = np.percentile(found, [50, 90, 99])
        assert [told["p50"], told["p90"], told["p99"]] == pytest.approx(wanted, rel=3e-3)
    waits_s = sum(each["finish_s"] - each["arrival_s"] for each in records)
    assert figures["mean_in_system"] == pytest.approx(waits_s / figures["duration_s"], rel=1e-4)


def test_who_comes_during_a_long_step_is_in_the_system() -> None:
    random, params = np.random.default_rng(0), SamplingParams(max_tokens=3, ignore_eos=True)
    trace = [
        Request(str(n), random.integers(0, 1000, 190), params, arrival_s=0.02 * n)  # a step is 0.2 s
        for n in range(40)
    ]
    patient = scheduler(num_slots=32, num_pages=1000, max_batch_tokens=1000)
    totals = serve(trace, patient, Fixed(), keep_records=True)
    assert totals.records is not None
    waited_s = sum(each["finish_s"] - each["arrival_s"] for each in totals.records)
    assert totals.running_s + totals.waiting_s == pytest.approx(waited_s, rel=1e-4)


def test_who_is_refused_has_failed() -> None:
    long = Request("long", np.arange(900), SamplingParams(max_tokens=3, ignore_eos=True))
    figures = serve([long, *requests(3, 9.0)], scheduler(), Fixed()).figures()
    assert (figures["requests"], figures["completed"], figures["failed"]) == (4, 3, 1)


@pytest.mark.parametrize("num_slots", [2, 32])
def test_each_sample_of_a_prompt_is_a_request(num_slots: int) -> None:
    """Also where a sample finds no free slot beside its leader, and where the request is refused."""
    lines = [
        {"id": str(n), "prompt_token_ids": [n, 1, 2], "max_tokens": 4, "n": 3, "arrival_s": n / 9}
        for n in range(12)
    ]
    lines.append({"id": "long", "prompt_token_ids": [1] * 900, "max_tokens": 4, "n": 2, "arrival_s": 2.0})
    raw = [json.dumps(each).encode() for each in lines]
    asked = list(trace.read(raw, 1000, lambda fields: parse_request(fields, None)))
    whole = serve(asked[:-1], scheduler(num_slots=num_slots), Fixed(), keep_records=True)
    stated = {"SIMULATED": "by a test", "slots": num_slots, "max_tokens_per_step": 1}
    figures = {**stated, **whole.figures(), "records": whole.records}
    assert (figures["requests"], figures["completed"], figures["failed"]) == (36, 36, 0)
    assert figures["mean_batch"] * figures["steps"] == pytest.approx(36 * 4, rel=0.01)
    verdict = audit(figures)
    assert not verdict["refused"]
    assert {"spans", "Little", "recount"} <= {*verdict["passed"]}
    refused = serve(asked[-1:], scheduler(), Fixed()).figures()
    assert (refused["requests"], refused["completed"], refused["failed"]) == (2, 0, 2)


def test_a_device_is_at_one_step_at_a_time() -> None:
    busy_s = []
    for overlap in (False, True):
        totals = serve(requests(60, 50.0), scheduler(), Fixed(), overlap=overlap)
        duration_s = totals.last_finish_s - totals.first_arrival_s
        assert 0.9 * duration_s < totals.busy_s <= 1.001 * duration_s
        busy_s.append(totals.busy_s)
    assert busy_s[1] == pytest.approx(busy_s[0], rel=0.05)


def test_a_small_rate_is_told_with_enough_digits() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    trace = [Request(str(n), np.arange(5), params, arrival_s=19.1 * n) for n in range(100)]
    figures = serve(trace, scheduler(), Fixed()).figures()
    assert figures["requests_per_s"] == pytest.approx(100 / figures["duration_s"], rel=1e-4)
    assert "rate x duration" in audit(figures)["passed"]
    assert [rounded(each, 3) for each in (0.0, 0.0123456, 3.45678, 345.678)] == [0, 0.01235, 3.457, 345.678]
    rarely = [Request(str(n), np.arange(5), params, arrival_s=1910.0 * n) for n in range(40)]
    assert "Little, running" in audit(serve(rarely, scheduler(), Fixed()).figures())["passed"]


def test_the_means_are_left_out_where_some_had_no_time_left() -> None:
    def trace(timeout_s: float | None) -> list[Request]:
        found = list(requests(100, 20.0))
        for each in found:
            each.timeout_s = timeout_s
        return found

    figures = serve(trace(2.5), scheduler(), Fixed()).figures()
    assert 30 < figures["failed"] < 70
    assert not {"mean_running", "mean_in_system"} & set(figures)
    assert set(figures["itl_ms"]) == {"p50", "p90", "p99"}, "gaps of whom the time ran out are among them"
    assert not audit(figures)["refused"]
    assert "Little" in audit(serve(trace(None), scheduler(), Fixed()).figures())["passed"]


def test_a_trace_out_of_order_is_refused() -> None:
    first, second = requests(2, 1.0)
    with pytest.raises(ValueError, match=r"request 0 arrives at .* sort the trace by arrival_s"):
        serve([second, first], scheduler(), Fixed())


def test_two_sketches_add_up() -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, 20_000)
    whole, part, other = Sketch(), Sketch(), Sketch()
    whole.add_all(values)
    part.add_all(values[:7_000])
    for each in values[7_000:].tolist():
        other.add(each)
    part.merge(other)
    assert part.milliseconds() == whole.milliseconds()
    assert whole.quantile_s(0.99) == pytest.approx(np.percentile(values, 99), rel=2e-3)
    assert whole.share_within(float(np.median(values))) == pytest.approx(0.5, abs=2e-3)


def test_lines_are_read_one_at_a_time() -> None:
    lines = [
        {"id": "a", "prompt_token_ids": [1, 2, 3], "max_tokens": 4, "arrival_s": 0.5, "temperature": 0.7},
        {"id": "b", "num_prompt_tokens": 9, "max_tokens": 2, "arrival_s": 1, "priority": 3},
    ]
    raw = [json.dumps(each).encode() for each in lines]
    first, second = trace.read(raw, 100)
    assert (first.prompt.tolist(), first.params.max_tokens, first.params.ignore_eos) == ([1, 2, 3], 4, True)
    assert (second.num_prompt_tokens, second.priority) == (9, 3)
    with pytest.raises(ValueError, match="line 2: give prompt_token_ids or num_prompt_tokens"):
        list(trace.read([raw[0], b'{"id": "c", "prompt": "text"}'], 100))
    reasons: list[str] = []
    kept = list(trace.read([b"{", b"", raw[0], b'{"prompt_token_ids": [1]}'], 100, bad=reasons.append))
    assert [each.id for each in kept] == ["a"]
    assert [each.partition(":")[0] for each in reasons] == ["line 1", "line 4"]


def test_a_field_that_is_null_counts_as_absent() -> None:
    least = {"id": "a", "prompt_token_ids": [1, 2]}
    names = ("max_tokens", "arrival_s", "tenant", "cache_salt", "priority", "beam_width", "n", "timeout_s")
    absent, null = (
        next(trace.read([json.dumps(each).encode()], 100)) for each in (least, least | dict.fromkeys(names))
    )
    assert repr(null) == repr(absent)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ('"num_prompt_tokens": 3, "arrival_s": -1', "arrival_s is -1.0; it must be a number from 0 to"),
        ('"num_prompt_tokens": 3, "timeout_s": 0', "timeout_s is 0.0; it must be a number above 0"),
        ('"prompt_token_ids": [1, 3000000000]', "prompt_token_ids holds 3000000000; ids go from 0 to 99"),
        (
            '"num_prompt_tokens": 10000000000000',
            "num_prompt_tokens is 10000000000000; it must be an integer from 1 to",
        ),
        ('"num_prompt_tokens": 3, "x": ' + "[" * 10**5 + "]" * 10**5, "the JSON is nested too deeply"),
    ],
)
def test_a_line_that_cannot_be_is_named_and_may_be_skipped(fields: str, reason: str) -> None:
    raw = [b'{"id": "a", "num_prompt_tokens": 2}', f'{{"id": "b", {fields}}}'.encode()]
    with pytest.raises(trace.BadLine, match=f"line 2: {re.escape(reason)}"):
        list(trace.read(raw, 100))
    reasons: list[str] = []
    assert [each.id for each in trace.read(raw, 100, bad=reasons.append)] == ["a"]
    assert len(reasons) == 1


@pytest.mark.parametrize("name", ["ascend910", "ascend910b", "ascend910c", "h200"])
def test_no_step_is_faster_than_its_floors(name: str) -> None:
    device = DeviceRates.load(name)
    costs = Roofline(LLAMA_7B, device, graphs=256)
    weights_s = LLAMA_7B.step_weight_bytes / (device.memory_gb_per_s * 1e9)
    one_s = costs.time_s(1, 1, 1, 32 * 1024, 32 * 1024)
    assert one_s > weights_s
    prompt_s = costs.time_s(2048, 1, 1, 32 * 2048, 32 * 2048 * 2049 / 2)
    operations = 2 * 6.4e9 * 2048
    assert prompt_s > operations / (device.tflop_per_s["float16"] * 1e12)
    assert costs.time_s(257, 1, 1, 0, 0) > costs.time_s(256, 1, 1, 0, 0)  # a tile more
    halves_s = Roofline(LLAMA_7B, device, tensor=2, graphs=256).time_s(2048, 1, 1, 32 * 2048, 2e6)
    assert prompt_s / 2 < halves_s < prompt_s


def test_decodes_see_all_that_is_known() -> None:
    starts = np.array([7, 0, 4000])
    decodes = Batch(np.arange(3), starts, starts + 1, np.arange(3), np.arange(3), starts + 1)
    device = DeviceRates.load("h200")
    assert Roofline(LLAMA_7B, device).seen(decodes, 3) == (32 * 4010, 32 * 4010)
    windows = (None,) * 16 + (100,) * 16
    near = 16 * 4010 + 16 * (8 + 1 + 101)
    context, pairs = Roofline(replace(LLAMA_7B, layers=layer_specs(windows)), device).seen(decodes, 3)
    assert (context, pairs) == (near, 16 * 4010 + 16 * (8 + 1 + 100))


def test_a_window_is_seen_by_each_token_of_a_span() -> None:
    device = DeviceRates.load("h200")
    starts, stops = np.array([0, 0, 500, 1000, 3000]), np.array([2048, 700, 900, 1100, 3001])
    batch = Batch(np.arange(5), starts, stops, np.arange(5), np.arange(5), stops)
    costs = Roofline(replace(LLAMA_7B, layers=layer_specs((1024,) * 32)), device)
    exact = sum(
        min(place + 1, 1024)
        for start, stop in zip(starts.tolist(), stops.tolist())
        for place in range(start, stop)
    )
    assert costs.seen(batch, int((stops - starts).sum()))[1] == 32 * exact


def test_pages_that_move_are_read_and_written() -> None:
    starts = np.array([7])
    still = Batch(np.arange(1), starts, starts + 1, np.arange(1), np.arange(1), starts + 1)
    moved = replace(still, copies=(PageCopy(np.arange(4, 9), np.arange(10, 15)),))
    slots, device = SlotPool(4, 200, 16), DeviceRates.load("ascend910")
    for tensor, stage, share in ((1, None, 1), (2, ModelPart(8, has_head=False), 1 / 8)):
        costs = Roofline(LLAMA_7B, device, tensor=tensor, stage=stage)
        num_bytes = 2 * 5 * 16 * LLAMA_7B.kv_bytes_per_token() * share
        more_s = costs.step_s(moved, slots) - costs.step_s(still, slots)
        assert more_s == pytest.approx(num_bytes / device.bytes_per_s)


def test_decode_reads_what_it_must() -> None:
    device = replace(DeviceRates.load("ascend910b"), host_us=0, graph_us=0, kernel_us=0)
    costs = Roofline(LLAMA_7B, device, graphs=256)
    alone_s, deep_s = costs.time_s(1, 1, 1, 0, 0), costs.time_s(1, 1, 1, 32 * 4000, 0)
    assert deep_s - alone_s == pytest.approx(
        4000 * LLAMA_7B.kv_bytes_per_token() / device.bytes_per_s, rel=0.01
    )
    with pytest.raises(ValueError, match="has no rate for bfloat16"):
        Roofline(replace(LLAMA_7B, dtype="bfloat16"), DeviceRates.load("ascend910")).time_s(1, 1, 1, 1, 1)
