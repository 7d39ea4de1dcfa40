"""The router's metrics for Prometheus."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.cluster.engines.registry import CachedPrefix, Engine, EngineState


class Purpose(enum.StrEnum):
    """Purpose of a request to an engine: prefill for another engine, or an answer."""

    PREFILL = "prefill"
    ANSWER = "answer"


class _EngineGauges(Collector):
    """Gauges of each engine's state and load."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        labels = ["engine", "role"]
        up = GaugeMetricFamily("quire_route_engine_up", "Whether the engine gets requests.", labels=labels)
        running = GaugeMetricFamily(
            "quire_route_engine_in_flight", "Number of requests at the engine.", labels=labels
        )
        waiting = GaugeMetricFamily(
            "quire_route_engine_waiting_bytes",
            "Bytes of prompts at the engine that it has not cached and not answered yet.",
            labels=labels,
        )
        followed = GaugeMetricFamily(
            "quire_route_engine_followed", "Whether the engine's KV events are followed.", labels=labels
        )
        cached = GaugeMetricFamily(
            "quire_route_engine_cached_blocks",
            "Number of KV blocks that the engine is known to have cached, by its KV events.",
            labels=labels,
        )
        for engine in list(self._engines):  # another thread may add one
            values = [engine.url, engine.role.value]
            up.add_metric(values, float(engine.state is EngineState.UP))
            running.add_metric(values, engine.num_requests)
            waiting.add_metric(values, engine.num_waiting_bytes)
            followed.add_metric(values, float(engine.blocks is not None))
            cached.add_metric(values, 0 if engine.blocks is None else len(engine.blocks))
        yield from (up, running, waiting, followed, cached)


class RouterMetrics:
    """Counters and gauges of one router.

    Args:
        engines: all engines; a live view.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineGauges(engines))

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"quire_route_{name}", meaning, labels, registry=self._registry)

        self.in_flight = Gauge(
            "quire_route_in_flight", "Number of requests being served.", registry=self._registry
        )
        self.answers = counter("answers", "Number of answers to clients, by status.", "status")
        self.requests = counter(
            "engine_requests", "Number of requests sent to an engine, by their purpose.", "engine", "purpose"
        )
        self.failures = counter(
            "engine_failures", "Number of requests that an engine failed to answer.", "engine", "purpose"
        )
        self.retries = counter("retries", "Number of requests retried on another engine.")
        self.fallbacks = counter(
            "prefill_fallbacks", "Number of prompts that should have been prefilled elsewhere, but were not."
        )
        self.direct = counter(
            "direct_requests", "Number of requests with too few uncached bytes for a prefill engine."
        )
        self._prefix_lookups = counter(
            "prefix_lookups", "Number of prompts, by what reports their cached prefix.", "source"
        )
        self._prefix_hits = counter(
            "prefix_hits", "Number of prompts with a cached prefix, by what reports it.", "source"
        )
        self._prefix_hit_bytes = counter(
            "prefix_hit_bytes", "Number of cached bytes of prompts, by what reports it.", "source"
        )
        self.not_tokenized = counter(
            "not_tokenized", "Number of prompts that could not be tokenized in time."
        )
        self.continued = counter("continued_streams", "Number of times that an engine continued a stream.")
        self.broken = counter("broken_answers", "Number of answers that engines did not complete.")

    def count_prefix(self, prefix: CachedPrefix) -> None:
        """Count the cached prefix on the engine chosen for a prompt."""
        self._prefix_lookups.labels(prefix.source).inc()
        if prefix.num_bytes:
            self._prefix_hits.labels(prefix.source).inc()
            self._prefix_hit_bytes.labels(prefix.source).inc(prefix.num_bytes)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def forget(self, engine: Engine) -> None:
        """Drop the counters of a removed engine."""
        for family in (self.requests, self.failures):
            for purpose in Purpose:
                family.remove(engine.url, purpose)
