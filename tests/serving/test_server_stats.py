"""Steps, tokens and ends of requests are counted, and reported, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from borders.refusal import BadRequest
from continuous_batching.counters import Counters
from continuous_batching.request import Request, SamplingParams
from serving.answers.answers import AnswerStream
from serving.api.pieces import Turns
from serving.api.writer import AnswerWriter
from serving.async_llm import AsyncLLM
from serving.engine.messages import Beat, EngineFacts, ExpertTable, SampleEnd, StepTimes
from serving.failures import ClientGone, Failure, RequestFailed
from serving.metrics.exposition import Exposition
from serving.metrics.server_stats import MOST_RECENT, NO_GAUGES, PER_REQUEST, TOKENS, Histogram, ServerStats
from serving.text.tokenizer import TextOptions
from tests.serving.server import TINY

FACTS = EngineFacts(100, (1,), 64, 4, 101, 16, 1024, 0, "cpu", 1000, 200, True, None, 1.0, 8)


def samples(stats: ServerStats) -> dict[tuple[str, str], float]:
    """By name and by the label that is its own."""
    text = Exposition(stats, 'a "model"', lambda: None).text().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            own = {key: value for key, value in each.labels.items() if key not in ("model_name", "engine")}
            found[each.name, ",".join(own.values())] = each.value
            assert each.name.startswith("process_") or each.labels["model_name"] == 'a "model"'
    return found


def answer(**params: Any) -> AnswerStream:
    request = Request("r", np.array([3, 4, 5]), SamplingParams(max_tokens=7, **params))
    return AnswerStream(request, None, TextOptions(), num_answers=1, max_unread_tokens=10)


def beat(counters: Counters, **fields: Any) -> Beat:
    told = {"held_back": None, "shared_pages": 0, "wrong_pages": 0, "gauges": NO_GAUGES} | fields
    return Beat(counters=counters, **told)


@pytest.mark.parametrize(
    ("bounds", "scale"), [(TOKENS, 1.0), (PER_REQUEST, 1.0), ((1_000_000,), 1.0), ((10, 50, 1000), 1e-6)]
)
def test_bounds_are_written_as_prometheus_own_client_writes_them(
    bounds: tuple[float, ...], scale: float
) -> None:
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram(
        "h", "", buckets=[round(each * scale, 9) for each in bounds], registry=registry
    )
    (family,) = theirs.collect()
    expected = [each.labels["le"] for each in family.samples if each.name == "h_bucket"]
    assert [bound for bound, _ in Histogram(bounds).buckets(scale)] == expected


def test_a_value_at_a_bound_lies_below_it_as_prometheus_has_it() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 7):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("5.0", 4), ("+Inf", 5)]
    assert histogram.buckets(1e-3)[2] == ("0.005", 4)
    assert histogram.sum == 11.5
    assert histogram.num == 5
    at_once = Histogram((1, 2, 5))
    at_once.observe_all([0, 1, 1.5, 2, 7])
    at_once.observe_all([])
    assert (at_once.buckets(), at_once.sum) == (histogram.buckets(), histogram.sum)


@pytest.mark.slow
def test_times_for_the_next_sample_are_bounded() -> None:
    stats = ServerStats()
    for number in range(MOST_RECENT + 5):
        stats.first_token(answer(), float(number))
        stats.next_token(float(number))
    for times in stats.recent_times():
        assert (len(times), times[-1]) == (MOST_RECENT, MOST_RECENT + 4)
    assert stats.recent_times() == ([], [])


def test_what_was_counted_outlives_the_engine_that_counted_it() -> None:
    stats = ServerStats()
    stats.ready(FACTS, 1.5)
    stats.beat(beat(Counters(steps=5, preemptions=2), wrong_pages=1))
    stats.beat(beat(Counters(steps=9, preemptions=2), wrong_pages=1))
    stats.lost("killed")
    assert samples(stats)["cb_engine_up", ""] == 0
    stats.ready(FACTS, 0.5)
    stats.beat(beat(Counters(steps=3, preemptions=4)))
    found = samples(stats)
    assert found["cb_steps_total", ""] == 12
    assert found["cb_preemption_total", ""] == found["vllm:num_preemptions_total", ""] == 6
    assert found["cb_kv_page_leak_total", ""] == 1
    assert found["cb_engine_restarts_total", ""] == 1
    assert found["cb_engine_up", ""] == 1


def test_the_most_chosen_expert_is_told_by_layer_until_the_engine_ends() -> None:
    stats = ServerStats()
    stats.ready(FACTS, 1)
    stats.beat(beat(Counters(), experts=ExpertTable([[6, 1, 1, 0], [], [5, 5, 5, 5], [0, 0, 0, 0]], 2, 3)))
    stats.beat(beat(Counters()))  # a beat between two readings
    found = {label: value for (name, label), value in samples(stats).items() if "expert" in name}
    assert found == {"0": 3.0, "2": 1.0}
    stats.lost("killed")
    assert not [name for name, _ in samples(stats) if "expert" in name]


def test_each_sample_ends_once_for_one_reason() -> None:
    stats = ServerStats()
    stats.ready(FACTS, 1)
    told = [answer() for _ in range(4)]
    for each in told:
        stats.added(each)
    end = SampleEnd(0, "length", None, 3, 0, 0, 0.25, 0.5, 1.0, [])
    told[0].samples[0].num_tokens = 3
    told[0].finish(0, end)
    stats.ended(told[0], 0, end, 2.0)
    stats.refused(told[1], "queue_full")
    for each in (told[0], *told[2:]):
        stats.accepted(each)
    stats.aborted(told[2], "engine_lost")
    stats.lost("killed")
    found = samples(stats)
    ends = {
        label: count for (name, label), count in found.items() if name == "cb_sample_ends_total" and count
    }
    assert ends == {"length": 1, "refused": 1, "engine_lost": 2}
    assert found["cb_samples_total", ""] == 4
    assert found["cb_samples_open", ""] == 0
    assert found["vllm:prompt_tokens_total", ""] == 9, "a prompt that is refused is not computed"
    for name in ("request_prompt_tokens", "request_params_n", "request_params_max_tokens"):
        assert found[f"vllm:{name}_count", ""] == 3
    assert found["cb_rejects_total", "queue_full"] == 1
    assert found["cb_aborts_total", "engine_lost"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_decode_time_seconds_sum", ""] == 1
    assert found["vllm:request_inference_time_seconds_sum", ""] == 1.5
    assert found["vllm:request_time_per_output_token_seconds_sum", ""] == 0.5
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 3


@pytest.mark.parametrize(("params", "counted"), [({}, 2), ({"beam_width": 4}, 3)])
def test_tokens_behind_a_stop_string_are_not_the_answers(params: dict[str, Any], counted: int) -> None:
    """A beam search tells of the best hypothesis, and its sample has the tokens of all."""
    stats, told = ServerStats(), answer(**params)
    told.samples[0].num_tokens = 12 if params else 2
    end = SampleEnd(0, "stop", None, 3, 0, 0, 0.25, 0.5, 1.0, [])
    told.finish(0, end)
    stats.ended(told, 0, end, 2.0)
    assert (stats.answer_lens.sum, stats.longest_lens.sum) == (counted, counted)


@pytest.mark.parametrize(
    ("failure", "counted"),
    [
        (BadRequest("prompt", "is too long"), {"sibling": 2}),
        (RequestFailed("it failed"), {"sibling": 2}),
        (None, {"disconnect": 3}),
    ],
)
def test_prompts_beside_one_that_failed_end_by_no_disconnect(
    failure: BadRequest | Failure | None, counted: dict[str, int]
) -> None:
    llm, told = AsyncLLM(TINY), [answer(), answer(), answer()]
    unused: Any = None

    async def receive() -> dict[str, str]:
        if failure is not None:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        if failure is not None:
            told[1].fail(failure)
        request: Any = SimpleNamespace(receive=receive)
        await AnswerWriter(llm, Turns(), told).whole(request, unused)

    with pytest.raises(ClientGone if failure is None else type(failure)):
        asyncio.run(work())
    assert dict(llm.stats.aborts) == counted


def test_what_a_client_asked_for_is_no_failure_of_the_model() -> None:
    stats = ServerStats()
    for is_at_fault in (True, True, False):
        told = answer()
        stats.added(told)
        end = SampleEnd(0, "error", "why", 1, 0, 0, 0.25, 0.5, 1.0, [], is_at_fault=is_at_fault)
        told.finish(0, end)
        stats.ended(told, 0, end, 2.0)
    found = samples(stats)
    assert found["cb_sample_ends_total", "blocked"] == 2
    assert found["cb_sample_ends_total", "error"] == 1
    assert found["vllm:corrupted_requests_total", ""] == 1
    assert found["vllm:request_success_total", "error"] == 1


def test_a_step_is_counted_and_an_end_without_one_is_not() -> None:
    stats = ServerStats()
    stats.ready(FACTS, 1)
    stats.stepped(StepTimes(0.0045, 0.004, 3, 50, 40))
    stats.stepped(StepTimes(0, 0, 0, 0, 0))
    found = samples(stats)
    assert found["cb_batch_size_count", ""] == 1
    assert found["cb_prefill_tokens_total", ""] == 40
    assert found["cb_decode_tokens_total", ""] == 10
    assert found["cb_batch_utilization", ""] == 0.25
    assert found["cb_iteration_latency_ms_sum", ""] == pytest.approx(4.5)  # not cut to whole milliseconds
    assert found["cb_iteration_latency_ms_bucket", "5.0"] == 1
    assert found["cb_iteration_latency_ms_bucket", "2.0"] == 0
    assert found["cb_iteration_latency_seconds_bucket", "0.005"] == 1
    assert found["cb_scheduler_overhead_us_sum", ""] == pytest.approx(500)


def test_who_waits_is_told_with_the_reason() -> None:
    stats = ServerStats()
    stats.ready(FACTS, 1)
    pages = {"held_pages": 30, "idle_pages": 10, "free_pages": 60}
    waiting = replace(NO_GAUGES, running_requests=2, waiting_requests=7, lookups={"whole": 3}, **pages)
    stats.beat(beat(Counters(), held_back="pages", gauges=waiting, shared_pages=4))
    found = samples(stats)
    assert found["cb_requests_waiting_for", "pages"] == 7
    assert found["cb_requests_waiting_for", "slots"] == 0
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == 7
    assert found["cb_held_back_seconds_total", "pages"] > 0
    assert found["vllm:kv_cache_usage_perc", ""] == 0.3
    assert found["cb_prefix_lookups_total", "whole"] == 3
    assert found["cb_kv_pages_shared", ""] == 4
