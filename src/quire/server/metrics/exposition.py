"""The Prometheus text format, written fast enough to be read many times a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class TextWriter:
    """Writes metrics as `prometheus_client` does, which takes four times as long.

    As long as names and labels are those of the time before, only values are formatted: the rest of each line
    is kept.
    """

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._parts = [""]  # of the text, between values
        self._order: list[int] = []  # the sample whose value follows each part

    def write(self, metrics: Sequence[Metric]) -> bytes:
        """Return metrics in the text format."""
        samples = [sample for metric in metrics for sample in metric.samples]
        keys = [[metric.name for metric in metrics], *((sample.name, sample.labels) for sample in samples)]
        if keys != self._keys:
            self._learn(metrics)
            self._keys = keys
        values = [floatToGoString(sample.value) for sample in samples]  # type: ignore[no-untyped-call]
        lines = [start + values[index] for start, index in zip(self._parts[:-1], self._order, strict=True)]
        return "".join([*lines, self._parts[-1]]).encode()

    def _learn(self, metrics: Iterable[Metric]) -> None:
        """Have the library write the numbers of samples in place of their values, and cut the text there."""
        text = generate_latest(_Numbered(metrics)).decode()
        self._parts, self._order, rest = [], [], ""
        for line in filter(None, text.split("\n")):
            if line.startswith("#"):
                rest += line + "\n"
                continue
            start, _, number = line.rpartition(" ")
            self._parts.append(f"{rest}{start} ")
            self._order.append(int(float(number)))
            rest = "\n"
        self._parts.append(rest)


class _Numbered(Collector):
    """The metrics with the numbers of their samples as values."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        number = 0
        for metric in self._metrics:
            numbered = Metric(metric.name, metric.documentation, metric.type)
            for sample in metric.samples:
                numbered.samples.append(Sample(sample.name, sample.labels, number))
                number += 1
            yield numbered
