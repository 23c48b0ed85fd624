"""One span a request, where it belongs, with figures and without text."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from serving.answers.answers import AnswerStream
from serving.engine.messages import ExpertTable, SampleEnd
from serving.text.tokenizer import TextOptions

trace = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from serving.metrics.traces import Traces  # noqa: E402


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Traces:
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)
    traces.model = "tiny"
    return traces


def asked(first_stream: int, num_samples: int = 1, name: str = "chatcmpl-1") -> AnswerStream:
    params = SamplingParams(max_tokens=7, temperature=0.5)
    request, *followers = (Request(f"{name}", np.arange(3, 8), params) for _ in range(num_samples))
    request.followers = followers
    answer = AnswerStream(
        request,
        None,
        TextOptions(is_chat=name.startswith("chat")),
        num_answers=num_samples,
        max_unread_tokens=10,
    )
    answer.first_stream = first_stream
    return answer


def end(traces: Traces, answer: AnswerStream, index: int, reason: str = "length") -> None:
    answer.samples[index].num_tokens = 3
    # A token beyond a stop string, which the engine had begun before it was found, is in no usage
    num_computed = 4 if reason == "stop" else 3
    ended = SampleEnd(answer.first_stream + index, reason, None, num_computed, 4, 0, 0.25, 0.5, 1.0, [])
    answer.finish(index, ended)
    traces.ended(answer, index, ended, 2.0)


def test_a_span_says_how_unevenly_experts_were_chosen_where_they_are_counted(
    traces: Traces, exporter: InMemorySpanExporter
) -> None:
    for stream, experts in enumerate((None, ExpertTable([[3, 1], [], [5, 5]], 1, 4))):
        traces.experts = experts
        answer = asked(stream)
        traces.added(answer)
        end(traces, answer, 0)
    found = [
        dict(span.attributes or {}).get("engine.expert_imbalance") for span in exporter.get_finished_spans()
    ]
    assert found == [None, 1.5]


def test_a_request_is_one_span_when_its_last_sample_ends(
    traces: Traces, exporter: InMemorySpanExporter
) -> None:
    answer = asked(0, num_samples=2)
    traces.added(answer)
    traces.first_token(answer, 0.75)
    end(traces, answer, 1)
    assert not exporter.get_finished_spans()
    end(traces, answer, 0, "stop")
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat tiny"
    assert span.parent is None
    assert span.status.is_unset
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "continuous_batching",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.e2e": 2.0,
    }
    assert traces.ends == {"stop": 1, "length": 1}  # it counts besides


def test_what_does_not_end_well_says_how(traces: Traces, exporter: InMemorySpanExporter) -> None:
    refused, aborted, lost, late = (asked(stream, name=f"cmpl-{stream}") for stream in range(4))
    for answer in (refused, aborted, lost, late):
        traces.added(answer)
    traces.refused(refused, "queue_full")
    end(traces, aborted, 0, "abort")
    traces.lost("killed")
    end(traces, late, 0)
    traces.close()
    spans = exporter.get_finished_spans()
    kinds = [(span.attributes or {})["error.type"] for span in spans]
    assert kinds == ["queue_full", "abort", "engine_lost", "engine_lost"]
    assert all(not span.status.is_ok for span in spans)
    assert spans[0].name == "text_completion tiny"


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ValueError, match="is no URL; it is such as"):
        Traces.to("localhost:4318")
