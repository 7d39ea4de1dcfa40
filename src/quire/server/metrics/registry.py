"""Prometheus metrics: what the server sees of each request, and the engine's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from quire.server.metrics.bulk_histogram import BulkHistogram
from quire.server.metrics.engine import EngineCollector
from quire.server.metrics.vllm import VLLMMetrics
from quire.server.tenancy.metrics import TenantCollector

if TYPE_CHECKING:
    from quire.server.tenancy.tenants import Tenants

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

_LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

EndLabel = Literal["stop", "length", "abort", "timeout", "error", "refused"]


class Metrics:
    """All metrics of one server, in registries of its own.

    Args:
        model_name: as clients know it; a label of those that have vLLM's names.
        tenants: of the server; None: it has none that are kept apart.
    """

    def __init__(self, model_name: str, tenants: Tenants | None = None) -> None:
        self._tenant_registry = CollectorRegistry()
        if tenants is not None:
            self._tenant_registry.register(TenantCollector(tenants))
        self.registry = CollectorRegistry()
        self._vllm_registry = CollectorRegistry()
        self._vllm_registry.register(VLLMMetrics(self.registry, model_name))
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.prompt_tokens = self._counter(
            "quire_prompt_tokens", "Number of prompt tokens of answered requests."
        )
        self.generation_tokens = self._counter(
            "quire_generation_tokens",
            "Number of generated tokens, with best_of and beam search those of the n sequences returned.",
        )
        self.finished = Counter(
            "quire_requests_finished",
            "Number of finished sequences (each of a request's n counts), by reason: stop, length, abort "
            "(client disconnected or the server stopped), timeout, error, or refused (never started).",
            ["reason"],
            registry=self.registry,
        )
        for reason in get_args(EndLabel):
            self.finished.labels(reason)
        self.http_requests = Counter(
            "quire_http_requests",
            "Number of requests over HTTP that have ended, by path as it is documented, method and status "
            "(499: the client left before).",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.time_to_first_token = self._histogram(
            "quire_time_to_first_token_seconds", "Seconds from the arrival of a request to its first token."
        )
        self.inter_token_latency = BulkHistogram(
            "quire_inter_token_latency_seconds",
            "Seconds between consecutive tokens of a sequence.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.request_duration = self._histogram(
            "quire_request_duration_seconds", "Seconds from the arrival of a request to its last token."
        )
        self.queue_time = self._histogram(
            "quire_queue_time_seconds",
            "Seconds from the arrival of a request, before it is tokenized, to its first step.",
        )
        self.prefill_time = self._histogram(
            "quire_prefill_time_seconds", "Seconds from the first step of a request to its first token."
        )
        self.decode_time = self._histogram(
            "quire_decode_time_seconds", "Seconds from the first token of a finished request to its last."
        )
        self.inference_time = self._histogram(
            "quire_inference_time_seconds",
            "Seconds from the first step of a finished request to its last token.",
        )
        self.time_per_output_token = self._histogram(
            "quire_time_per_output_token_seconds",
            "Mean of the seconds between the tokens of a sequence, observed once for each at its end.",
        )
        self.request_tokens = self._histogram(
            "quire_request_prompt_tokens",
            "Number of prompt tokens of a finished request.",
            _LENGTH_BUCKETS,
        )
        self.sequence_tokens = self._histogram(
            "quire_request_generation_tokens",
            "Number of generated tokens of a finished sequence (each of a request's n counts).",
            _LENGTH_BUCKETS,
        )

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float] = _LATENCY_BUCKETS) -> Histogram:
        return Histogram(name, meaning, registry=self.registry, buckets=buckets)

    def exposition(self, *, of_tenants: bool = False) -> bytes:
        """Return everything in the Prometheus text format; figures of single tenants only if so asked."""
        registries = [self.registry, self._vllm_registry, *([self._tenant_registry] if of_tenants else [])]
        return b"".join(map(generate_latest, registries))
