"""Traces: a span for each request to a model, with the attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import MissingPackageError

# The operations of the endpoints, by the last part of the path.
_OPERATIONS = {
    "completions": "text_completion", "generate": "text_completion", "infill": "text_completion",
    "embeddings": "embeddings", "embed": "embeddings", "rerank": "rerank",
}  # fmt: skip
# The facts of the request log, and their attributes. The times have vLLM's names; the conventions have none.
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "seed": "gen_ai.request.seed",
    "model": "gen_ai.response.model",
    "session": "gen_ai.conversation.id",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "decode_seconds": "gen_ai.latency.time_in_model_decode",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "seconds": "gen_ai.latency.e2e",
}


class _Head(msgspec.Struct):
    """The fields of a request that become attributes."""

    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    n: Any = None


_FIELDS = {
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "n": "gen_ai.request.choice.count",
}


class Traces:
    """Records the requests of a server as spans. They contain no texts.

    Args:
        provider: the provider of OpenTelemetry's SDK; None = spans are sent to the collector that the environment
            variables of OpenTelemetry name, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Raises:
        MissingPackageError: OpenTelemetry's SDK or exporter is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._provider = _provider() if provider is None else provider
        except ImportError as error:
            raise MissingPackageError(
                "traces cannot be sent", f"the package {error.name} is not installed",
                "run `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`",
            ) from None  # fmt: skip
        self._tracer = self._provider.get_tracer("genai.server")
        self._propagator, self._kind = TraceContextTextMapPropagator(), SpanKind.SERVER

    def record(
        self, method: str, route: str, headers: Mapping[str, str], body: bytes, facts: Mapping[str, Any],
        status: int,
    ) -> None:  # fmt: skip
        """Record a request that has ended.

        Args:
            method, route: the HTTP method, and the path of the endpoint.
            headers: the headers, of which `traceparent` names the span of the client.
            body: the body.
            facts: the facts of the request log, of which `seconds` is the duration.
            status: the HTTP status; 499 = the client closed the connection.
        """
        try:
            head = msgspec.json.decode(body, type=_Head)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            head = _Head()
        ended, operation = time.time_ns(), _operation(route)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "genai",
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "gen_ai.request.id": facts["id"],
        }
        for name, attribute in _FIELDS.items():
            if isinstance(value := getattr(head, name), str | int | float) and not isinstance(value, bool):
                attributes[attribute] = value if isinstance(value, str | float) or abs(value) < 2**63 else str(value)
        for name, attribute in _FACTS.items():
            if (value := facts.get(name)) is not None:
                # Attributes are signed integers of 64 bits, and seeds have no sign.
                attributes[attribute] = str(value) if isinstance(value, int) and value >= 2**63 else value
        first, queue = facts.get("first_token_seconds"), facts.get("queue_seconds")
        if first is not None and queue is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = max(0.0, first - queue)
        if status >= 400:
            attributes["error.type"] = str(status)
        model = attributes.get("gen_ai.request.model") or attributes.get("gen_ai.response.model") or ""
        span = self._tracer.start_span(
            f"{operation} {model}".strip()[:200], self._propagator.extract(headers), self._kind, attributes,
            start_time=ended - int(facts["seconds"] * 1e9),
        )  # fmt: skip
        if status >= 500:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, str(facts.get("error", ""))[:1000]))
        span.end(end_time=ended)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "genai")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _operation(route: str) -> str:
    if route.endswith("/chat/completions"):
        return "chat"
    return _OPERATIONS.get(route.rpartition("/")[2], "chat")
