"""Traces: the attributes and the parent of a request's span, without texts, and none unless they are wanted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

import genai
from genai.cli import app
from genai.errors import MissingPackageError
from genai.server.serving import Server, ServerOptions
from genai.server.traces import Traces

from .conftest import Running

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture(scope="module")
def traced(llm: genai.LLM) -> Iterator[tuple[Running, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)
    running = Running(Server(llm, ServerOptions(), name="pebble", traces=traces))
    yield running, exporter
    running.close()
    traces.close()


def one_span(exporter: InMemorySpanExporter) -> Any:
    """Wait for a span, which follows the end of the response."""
    while not (found := exporter.get_finished_spans()):
        time.sleep(0.005)
    exporter.clear()
    (span,) = found
    return span


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"max_tokens": 3, "ignore_eos": True, "stream": True}, "chat pebble"),
        ("/v1/messages", {"max_tokens": 3}, "chat pebble"),
        (
            "/v1/completions",
            {"prompt": "My secret", "max_tokens": 3, "ignore_eos": True, "model": "words"},
            "text_completion words",
        ),
    ],
)
def test_a_span_per_request(
    path: str, fields: dict[str, Any], name: str, traced: tuple[Running, InMemorySpanExporter]
) -> None:
    running, exporter = traced
    messages = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "My secret"}]}
    body = {**messages, "seed": 2**64 - 1, "temperature": 0.5, **fields}
    assert running.post(path, body, traceparent=PARENT).status_code == 200
    span = one_span(exporter)
    found = dict(span.attributes)
    assert span.name == name and format(span.context.trace_id, "032x") == PARENT[3:35]
    assert format(span.parent.span_id, "016x") == PARENT[36:52] and span.kind.name == "SERVER"
    assert found["gen_ai.operation.name"] == name.split()[0] and found["http.response.status_code"] == 200
    assert found["gen_ai.request.max_tokens"] == found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.usage.input_tokens"] > 0 and found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.request.temperature"] == 0.5 and found["gen_ai.request.seed"] == str(2**64 - 1)
    times = [found[f"gen_ai.latency.time_{part}"] for part in ("in_queue", "in_model_prefill", "in_model_decode")]
    assert all(one >= 0 for one in times) and sum(times) <= found["gen_ai.latency.e2e"] + 1e-3
    assert times[0] + times[1] == pytest.approx(found["gen_ai.latency.time_to_first_token"])
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-4)
    assert "secret" not in span.to_json()


def test_errors(traced: tuple[Running, InMemorySpanExporter], monkeypatch: pytest.MonkeyPatch) -> None:
    running, exporter = traced
    assert running.chat(temperature=-1).status_code == 400
    refused = one_span(exporter)
    assert refused.attributes["error.type"] == "400" and refused.status.status_code.name == "UNSET"
    monkeypatch.setattr("genai.server.turns._prepared", lambda *_: 1 / 0)
    assert running.chat().status_code == 500
    failed = one_span(exporter)
    assert failed.status.status_code.name == "ERROR" and "the server's log" in failed.status.description


def test_other_paths_and_broken_parents(traced: tuple[Running, InMemorySpanExporter]) -> None:
    running, exporter = traced
    with running.http as client:
        for path in ("/health", "/metrics", "/v1/models", "/nothing"):
            client.get(path)
        client.post("/v1/chat/completions", content=b"[", headers={"traceparent": "00-x"})
    span = one_span(exporter)
    assert span.parent is None and span.attributes["error.type"] == "400"


class _Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables of OpenTelemetry select the collector and the name of the service."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setattr(_Collector, "bodies", [])
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        traces = Traces()
        traces.record("POST", "/v1/messages", {"traceparent": PARENT}, b"{}", {"id": "req_1", "seconds": 0.5}, 503)
        traces.close()
        collector.shutdown()
    ((path, body),) = _Collector.bodies
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces"
    assert {one.key: one.value.string_value for one in sent.resource.attributes}["service.name"] == "mine"
    (span,) = sent.scope_spans[0].spans
    assert span.name == "chat" and span.parent_span_id.hex() == PARENT.split("-")[2] and span.status.code == 2
    assert span.end_time_unix_nano - span.start_time_unix_nano == 500_000_000


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackageError, match="is not installed"):
        Traces()
    assert app.run(["serve", "--port", "0", "--traces"]) == 1
    assert "pip install opentelemetry-sdk" in capsys.readouterr().err
