"""Record a trace span for each request, to show where its time was spent among services.

Spans use OpenTelemetry's names for generative models, and are children of the client's span (W3C's
`traceparent`). They hold no text. A thread sends them; spans that cannot be sent are dropped.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.answers.answers import AnswerStream
from serving.engine.messages import SampleEnd
from serving.metrics.prometheus_names import expert_imbalance
from serving.metrics.server_stats import TRACE_HEADERS, ServerStats

_TIMEOUT_S = 5.0


class Traces(ServerStats):
    """Statistics that also record a span for each request."""

    def __init__(self, provider: TracerProvider) -> None:
        super().__init__()
        self._provider = provider
        self._tracer = provider.get_tracer("continuous-batching")
        self._spans: dict[int, Span] = {}  # keyed by the first of a request's streams
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def to(url: str) -> Traces:
        """Return traces that are sent to a collector by OTLP over HTTP.

        Raises ValueError if `url` is not a URL.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"--otlp-endpoint {url!r} is no URL; it is such as http://127.0.0.1:4318")
        endpoint = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "continuous-batching"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S)))
        return Traces(provider)

    def close(self) -> None:
        """Send the remaining spans; takes some seconds if the collector does not answer."""
        self._end_all("shutdown")
        self._provider.shutdown()

    def added(self, answer: AnswerStream) -> None:
        super().added(answer)
        request = answer.request
        operation = "chat" if answer.is_chat else "text_completion"
        age_s = time.monotonic() - answer.arrival_s
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            self._propagator.extract(TRACE_HEADERS.get()),
            SpanKind.SERVER,
            start_time=time.time_ns() - int(1e9 * age_s),
        )
        params = request.params
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "continuous_batching",
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model,
                "gen_ai.response.id": answer.group,
                "gen_ai.request.choice.count": answer.num_answers,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            }
        )
        self._spans[answer.first_stream] = span

    def refused(self, answer: AnswerStream, reason: str) -> None:
        super().refused(answer, reason)
        self._end(answer.first_stream, reason)

    def first_token(self, answer: AnswerStream, since_arrival_s: float) -> None:
        super().first_token(answer, since_arrival_s)
        span = self._spans.get(answer.first_stream)
        if span is not None and answer.num_tokens == 0:
            span.set_attribute("gen_ai.latency.time_to_first_token", since_arrival_s)

    def ended(self, answer: AnswerStream, index: int, end: SampleEnd, since_arrival_s: float) -> None:
        super().ended(answer, index, end, since_arrival_s)
        ends = [each for each in answer.ends if each is not None]
        span = self._spans.get(answer.first_stream)
        if span is None or len(ends) < len(answer.samples):
            return
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [each.reason for each in ends],
                "gen_ai.usage.output_tokens": answer.num_tokens,  # Those beyond a stop string do not count
                "gen_ai.usage.cache_read.input_tokens": max(each.num_cached_tokens for each in ends),
                "gen_ai.latency.e2e": since_arrival_s,
            }
        )
        if loads := expert_imbalance(self):
            span.set_attribute("engine.expert_imbalance", max(loads.values()))
        for name, value in (
            ("time_in_queue", ends[0].queue_s),
            ("time_in_model_prefill", ends[0].prefill_s),
            ("time_in_model_decode", ends[0].decode_s),
        ):
            if value is not None:
                span.set_attribute(f"gen_ai.latency.{name}", value)
        broken = next((each.reason for each in ends if each.reason not in ("stop", "length")), None)
        self._end(answer.first_stream, broken)

    def lost(self, reason: str) -> None:
        super().lost(reason)
        self._end_all("engine_lost")

    def _end_all(self, error: str) -> None:
        for stream in list(self._spans):
            self._end(stream, error)

    def _end(self, stream: int, error: str | None) -> None:
        span = self._spans.pop(stream, None)
        if span is None:
            return
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
