"""A histogram for what each token makes an observation of."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class BulkHistogram(Collector):
    """A Prometheus histogram in which equal observations are counted at once, without a lock.

    One of `prometheus_client` goes through all buckets and takes two locks for each observation. One thread
    may observe, and any may collect.

    Args:
        name: of the metric.
        meaning: its help text.
        buckets: upper bounds, inclusive, in ascending order.
        registry: that collects it.
    """

    def __init__(
        self, name: str, meaning: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = (*buckets, math.inf)
        self._labels = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int) -> None:
        """Observe the same value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the metric; called by the registry."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for label, count in zip(self._labels, list(self._counts), strict=True):
            total += count
            buckets.append((label, total))
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)
