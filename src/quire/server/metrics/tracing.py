"""OpenTelemetry traces: a span for each generation call, sent to a collector by a separate thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from quire import __version__
from quire.request_output import RequestOutput
from quire.server.wire.errors import ApiError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_QUEUED_SPANS = 2048
"""Maximum spans waiting for the collector; beyond that, the oldest are dropped."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the collector to accept the last spans when the server stops."""

_LOG_INTERVAL = 60.0  # seconds between log lines about a failing collector
_NANOSECONDS = 1e9


class Tracing:
    """Creates spans, and sends them in batches from a thread, so that ending a span never blocks.

    Args:
        exporter: sends spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, operation: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> CallSpan:
        """Begin the span of a call.

        Args:
            operation: `gen_ai.operation.name`.
            headers: the request's headers; `traceparent` and `tracestate` give the span's parent.
            attributes: the span's attributes; those that are None are left out.
        """
        known = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(
            f"{operation} {known['gen_ai.request.model']}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "quire", **known},
        )
        return CallSpan(span)

    async def close(self) -> None:
        """Send the last spans, waiting at most `CLOSE_TIMEOUT` for the collector."""
        # A hanging collector would block the provider for half a minute.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_TIMEOUT)


class CallSpan:
    """The span of one call, which may have several prompts.

    Its times are those of the call as a whole: until the first step of any of its prompts, from there to the
    first token of any, and from there to the last.

    Args:
        span: the started span.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._start = time.monotonic()
        self._epoch = time.time() - self._start
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token = self._start
        self._latest: dict[int, RequestOutput] = {}  # by prompt

    def observe(self, prompt_index: int, output: RequestOutput) -> None:
        """Observe a cumulative output of one of the call's prompts."""
        now = time.monotonic()
        self._latest[prompt_index] = output
        if not any(completion.token_ids for completion in output.outputs):
            return
        self._last_token = now
        if self._first_token is None:
            self._first_token = now
            self._note("first_token", now)
            if output.first_scheduled_time is not None:
                self._scheduled = min(max(output.first_scheduled_time, self._start), now)
                self._note("first_scheduled", self._scheduled)

    def end(self, error: BaseException | None) -> None:
        """End the span with known values and the type of the error, whose text may quote the client."""
        self._span.set_attributes(self._usage() | self._latencies())
        if isinstance(error, Exception):
            kind = (error.code if isinstance(error, ApiError) else None) or type(error).__name__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR))
        elif error is not None:
            self._span.set_attribute("error.type", "client_left")
        self._span.end()

    def _note(self, event: str, at: float) -> None:
        self._span.add_event(event, timestamp=int((self._epoch + at) * _NANOSECONDS))

    def _usage(self) -> dict[str, Any]:
        outputs = [self._latest[index] for index in sorted(self._latest)]
        completions = [completion for output in outputs for completion in output.outputs]
        return {
            "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in completions),
            "gen_ai.usage.cache_read.input_tokens": sum(output.num_cached_tokens for output in outputs),
            "gen_ai.response.finish_reasons": [str(one.finish_reason) for one in completions if one.finished],
        }

    def _latencies(self) -> dict[str, float]:
        found = {"gen_ai.latency.e2e": time.monotonic() - self._start}
        if self._first_token is None:
            return found
        found["gen_ai.latency.time_to_first_token"] = self._first_token - self._start
        found["gen_ai.latency.time_in_model_decode"] = self._last_token - self._first_token
        if self._scheduled is not None:
            found["gen_ai.latency.time_in_queue"] = self._scheduled - self._start
            found["gen_ai.latency.time_in_model_prefill"] = self._first_token - self._scheduled
            found["gen_ai.latency.time_in_model_inference"] = self._last_token - self._scheduled
        return found


def tracing_to(endpoint: str) -> Tracing:
    """Return a `Tracing` to an OTLP collector over HTTP.

    Args:
        endpoint: URL; without a path, the protocol's default path is added.
    """
    logger = logging.getLogger(OTLPSpanExporter.__module__)
    if not logger.filters:
        logger.addFilter(_OncePerInterval())
    has_path = "/" in endpoint.partition("://")[2].rstrip("/")
    return Tracing(OTLPSpanExporter(endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces"))


class _OncePerInterval(logging.Filter):
    """Passes one line per `_LOG_INTERVAL`, as a dead collector causes several per batch."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOG_INTERVAL
        record.msg, record.args = f"traces are not delivered: {record.getMessage()}", None
        return True


def _resource() -> Resource:
    """Return the resource of all spans; OTEL_SERVICE_NAME may rename the service."""
    own = {"service.name": "quire", "service.version": __version__}
    return Resource.create(own).merge(OTELResourceDetector().detect())
