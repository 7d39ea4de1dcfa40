"""Traces: what is in a span, as the SDK's own exporter and a collector over HTTP get it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import threading
import time

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from fake_llm import REPLY
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.server import serve
from quire.server.app import create_app
from quire.server.metrics.tracing import MAX_QUEUED_SPANS, Tracing, tracing_to

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETION = {
    "model": "fake",
    "prompt": ["Hi", "Hey"],
    "max_tokens": 5,
    "n": 2,
    "temperature": 0.5,
    "seed": 1,
}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "the secret"}], "top_p": 0.75}


class Traced:
    """A server whose spans are kept in memory."""

    def __init__(self, llm) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(self.exporter)
        app = create_app(llm, ServerConfig(), tracing=self.tracing)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")

    async def spans(self):
        await self.tracing.close()
        return self.exporter.get_finished_spans()


@pytest.fixture
async def traced(llm):
    server = Traced(llm)
    async with server.http:
        yield server
        await server.tracing.close()


async def test_a_span_has_what_was_asked_for_and_what_came(traced):
    answer = (await traced.http.post("/v1/completions", json=COMPLETION)).json()
    [span] = await traced.spans()
    attributes = dict(span.attributes)
    latencies = {name: attributes.pop(name) for name in span.attributes if ".latency." in name}
    assert span.name == "text_completion fake"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert "cmpl-" + attributes.pop("gen_ai.request.id") == answer["id"]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": ("length",) * 4,
    }
    assert len(latencies) == 6
    assert all(value >= 0 for value in latencies.values())
    times = {event.name: event.timestamp for event in span.events}
    assert span.start_time <= times["first_scheduled"] <= times["first_token"] <= span.end_time


async def test_a_streamed_chat_belongs_to_the_trace_of_its_client_and_has_none_of_its_text(traced):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    await traced.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
    [span] = await traced.spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["vendor"] == "1"
    assert span.name == "chat fake"
    assert span.attributes["gen_ai.request.top_p"] == 0.75
    assert span.attributes["gen_ai.usage.output_tokens"] == len(REPLY)
    assert "secret" not in span.to_json()
    assert REPLY not in span.to_json()


@pytest.mark.parametrize(
    "traceparent", ["", "00-zz", f"ff-{TRACE}-{PARENT}-01", "00-" + "0" * 32, "x" * 5000]
)
async def test_a_trace_that_cannot_be_read_is_none(traced, traceparent):
    headers = {"traceparent": traceparent, "tracestate": "=,;" * 1000}
    assert (await traced.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    [span] = await traced.spans()
    assert span.parent is None


async def test_the_other_apis_have_spans_too(traced):
    await traced.http.post("/v1/responses", json={"model": "fake", "input": "Hi"})
    message = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    await traced.http.post("/v1/messages", json=message)
    spans = await traced.spans()
    assert [span.name for span in spans] == ["chat fake", "chat fake"]
    assert spans[0].attributes["gen_ai.response.id"].startswith("resp_")
    assert spans[1].attributes["gen_ai.response.id"].startswith("msg")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("fail", "generation_failed"), ("queue", "QueueFullError"), ("die", "EngineDeadError")],
)
async def test_a_call_that_fails_says_how_without_the_clients_text(traced, prompt, error):
    await traced.http.post("/v1/completions", json={"model": "fake", "prompt": f"{prompt} secret"})
    [span] = await traced.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == error
    assert "secret" not in span.to_json()


async def test_a_client_that_leaves_ends_its_span(traced, llm):
    body = {"model": "fake", "prompt": "hold", "max_tokens": 9}
    asking = asyncio.create_task(traced.http.post("/v1/completions", json=body))
    await llm.held.wait()
    asking.cancel()
    await asyncio.wait([asking])
    [span] = await traced.spans()
    assert span.attributes["error.type"] == "client_left"
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["gen_ai.usage.output_tokens"] == 3


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP, or leaves its clients waiting."""

    def __init__(self, *, hangs: bool = False) -> None:
        collector = self
        self.bodies: list[tuple[str, bytes]] = []
        self.asked = threading.Event()
        self.released = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.append((self.path, body))
                collector.asked.set()
                if hangs:
                    collector.released.wait(60)
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


async def ask(llm, sender: Tracing, number: int = 1) -> None:
    app = create_app(llm, ServerConfig(), tracing=sender)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost"
    ) as client:
        for _ in range(number):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await sender.close()


@pytest.mark.parametrize(
    ("path", "seen"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/own/path", "/own/path")]
)
async def test_a_collector_gets_spans_by_otlp(llm, path, seen, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with Collector() as collector:
        await ask(llm, tracing_to(collector.url + path), 2)
    [(got, body)] = collector.bodies
    assert got == seen
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert about["service.name"] == "quire"
    assert about["deployment.environment.name"] == "test"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["chat fake"] * 2
    numbers = {one.key: one.value.int_value for one in spans[0].attributes if one.value.HasField("int_value")}
    assert numbers["gen_ai.usage.output_tokens"] == len(REPLY)


async def test_the_environment_may_name_the_service(llm, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    server = Traced(llm)
    async with server.http:
        await server.http.post("/v1/completions", json=COMPLETION)
    assert {span.resource.attributes["service.name"] for span in await server.spans()} == {"chat-backend"}


async def test_a_collector_that_hangs_holds_nobody_up_and_spans_that_do_not_fit_are_dropped(llm):
    with Collector(hangs=True) as collector:
        sender = tracing_to(collector.url)
        for _ in range(2 * MAX_QUEUED_SPANS):
            sender.begin("chat", {}, {"gen_ai.request.model": "fake"}).end(None)
        assert await asyncio.to_thread(collector.asked.wait, 60)
        await ask(llm, sender)
        assert len(collector.bodies) == 1
        collector.released.set()
        while any(thread.name.startswith("Otel") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)  # its complaints would be taken for those of the next test


async def test_a_dead_collector_costs_one_line(llm, caplog):
    logging.getLogger(OTLPSpanExporter.__module__).filters.clear()  # another test may have had its line
    with Collector() as collector:
        url = collector.url
    sender = tracing_to(url)
    await ask(llm, sender, 3)
    until = time.monotonic() + 60
    while not lost_traces(caplog) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    await ask(llm, tracing_to(url), 3)
    [message] = lost_traces(caplog)
    assert str(collector.server_port) in message


def lost_traces(caplog):
    return [message for message in caplog.messages if "traces are not delivered" in message]


def test_without_the_extra_there_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "quire.server.metrics.tracing", None)
    monkeypatch.setattr(serve, "raise_descriptor_limit", lambda: None)
    config = ServerConfig(otlp_traces_endpoint="http://localhost:4318")
    with pytest.raises(ConfigError, match=r"needs the module .* pip install 'quire\[otel\]'"):
        serve.serve(EngineConfig(), config)


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a b", "x"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint .* http://localhost:4318/v1/traces"):
        ServerConfig(otlp_traces_endpoint=endpoint)
