"""Prometheus metrics: what the server sees of each request, and the engine's figures."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from quire.server.engine_metrics import EngineCollector
from quire.server.vllm_metrics import VLLMMetrics

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


EndLabel = Literal["stop", "length", "abort", "timeout", "error", "refused"]


class Metrics:
    """All metrics of one server, in registries of its own.

    Args:
        model_name: as clients know it; a label of those that have vLLM's names.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._vllm_registry = CollectorRegistry()
        self._vllm_registry.register(VLLMMetrics(self.registry, model_name))
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.prompt_tokens = self._counter(
            "quire_prompt_tokens", "Number of prompt tokens of answered requests."
        )
        self.generation_tokens = self._counter("quire_generation_tokens", "Number of generated tokens.")
        self.finished = Counter(
            "quire_requests_finished",
            "Number of finished sequences (each of a request's n counts), by reason: stop, length, abort "
            "(client disconnected or the server stopped), timeout, error, or refused (never started).",
            ["reason"],
            registry=self.registry,
        )
        for reason in get_args(EndLabel):
            self.finished.labels(reason)
        self.time_to_first_token = self._histogram(
            "quire_time_to_first_token_seconds", "Seconds from the arrival of a request to its first token."
        )
        self.inter_token_latency = self._histogram(
            "quire_inter_token_latency_seconds", "Seconds between consecutive tokens of a sequence."
        )
        self.request_duration = self._histogram(
            "quire_request_duration_seconds", "Seconds from the arrival of a request to its last token."
        )

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self.registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, registry=self.registry, buckets=_LATENCY_BUCKETS)

    def exposition(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry) + generate_latest(self._vllm_registry)
