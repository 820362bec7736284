"""Each request's OpenTelemetry spans, made at its end from the times that metrics measure.

    llm_request              from arrival to the last token; child of the client's span, if it sent a traceparent
      queue, prefill, decode     one of each a choice, by the engine's own times

Imported only with otlp_traces_endpoint, which needs the extra `otel`. Attributes follow OpenTelemetry's conventions for
generative AI: gen_ai.*."""

from __future__ import annotations

import opentelemetry.trace as trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.observability.context import ChoiceStats, RequestContext


class Tracing:
    """A RequestSink that exports spans."""

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "callboard"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("callboard")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, model: str, endpoint: str) -> Tracing:
        """Return spans that go to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(model, OTLPSpanExporter(endpoint))

    def __call__(self, request_id: str, context: RequestContext, choices: list[ChoiceStats], status: int) -> None:
        parent = self._propagator.extract({"traceparent": context.traceparent} if context.traceparent else {})
        began = [choice for choice in choices if choice.first_at]
        end = max((choice.last_at for choice in began), default=context.arrived_at)
        span = self._tracer.start_span(
            "llm_request",
            parent,
            kind=trace.SpanKind.SERVER,
            start_time=_ns(context.arrived_at),
            attributes={
                "gen_ai.request.model": context.model or self._model,
                "gen_ai.request.id": request_id,
                "gen_ai.usage.prompt_tokens": sum(choice.request.prompt_len for choice in choices),
                "gen_ai.usage.completion_tokens": sum(choice.num_output for choice in choices),
                "gen_ai.response.finish_reasons": [choice.reason for choice in choices],
                "http.response.status_code": status,
            },
        )
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for choice in began:
            admitted_at = choice.first_at - choice.prefill_s
            for name, start, stop in (
                ("queue", admitted_at - choice.queued_s, admitted_at),
                ("prefill", admitted_at, choice.first_at),
                ("decode", choice.first_at, choice.last_at),
            ):
                self._tracer.start_span(name, inside, start_time=_ns(start)).end(_ns(stop))
        span.end(_ns(end))

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
