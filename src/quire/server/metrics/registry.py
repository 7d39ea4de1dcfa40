"""Prometheus metrics of requests and of the engine."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from quire.server.metrics.engine import EngineCollector
from quire.server.tenancy.metrics import TenantCollector

if TYPE_CHECKING:
    from quire.server.tenancy.tenants import Tenants


_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

_LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

EndLabel = Literal["stop", "length", "abort", "timeout", "error", "refused"]


class Metrics:
    """All metrics of one model and, of a server's first model, those of the server; in registries of its own.

    Args:
        model_name: the model's name for clients, a label of metrics with vLLM's names.
        block_size: tokens per KV block.
        tenants: the server's tenants; None: there are no separate tenants.
    """

    def __init__(self, model_name: str, block_size: int, tenants: Tenants | None = None) -> None:
        self._tenant_registry = CollectorRegistry()
        if tenants is not None:
            self._tenant_registry.register(TenantCollector(tenants))
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._writer = TextWriter()
        self._vllm_metrics = VLLMMetrics(model_name, block_size)
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
            registry=None,
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

    def exposition(self, *, of_tenants: bool = False, others: Sequence[Metrics] = ()) -> bytes:
        """Return all metrics in the Prometheus text format.

        Args:
            of_tenants: whether to return those of single tenants, too.
            others: those of the server's other models; if there are any, all have the label `model_name`.
        """
        families = self._joined([self, *others]) if others else self._families()
        written = self._writer.write([*families, *self.http_requests.collect()])
        return written + generate_latest(self._tenant_registry) if of_tenants else written

    def _families(self, **labels: str) -> list[Metric]:
        """Return the model's metrics, those under Quire's names with more labels."""
        own = list(self.registry.collect())
        labelled = [_labelled(metric, labels) for metric in own] if labels else own
        return [*labelled, *self._vllm_metrics.renamed(own)]

    @staticmethod
    def _joined(models: Iterable[Metrics]) -> list[Metric]:
        """Return the metrics of several models, each name once."""
        by_name: dict[str, Metric] = {}
        for model in models:
            for metric in model._families(model_name=model._model_name):
                if by_name.setdefault(metric.name, metric) is not metric:
                    by_name[metric.name].samples += metric.samples
        return list(by_name.values())


def _labelled(metric: Metric, labels: Mapping[str, str]) -> Metric:
    labelled = Metric(metric.name, metric.documentation, metric.type)
    labelled.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples]
    return labelled


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


class BulkHistogram(Collector):
    """A Prometheus histogram that counts equal observations in one operation, without a lock.

    One of `prometheus_client` goes through all buckets and takes two locks for each observation. One thread
    may observe, and any may collect.

    Args:
        name: name of the metric.
        meaning: its help text.
        buckets: upper bounds, inclusive, in ascending order.
        registry: registry that collects it.
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


NAMES: Mapping[str, tuple[str, ...]] = {
    "quire_requests_running": ("vllm:num_requests_running",),
    "quire_requests_waiting": ("vllm:num_requests_waiting",),
    "quire_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc",),
    "quire_prefix_cache_queried_tokens": ("vllm:prefix_cache_queries",),
    "quire_prefix_cache_hit_tokens": ("vllm:prefix_cache_hits",),
    "quire_preemptions": ("vllm:num_preemptions",),
    "quire_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "quire_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "quire_prompt_tokens": ("vllm:prompt_tokens",),
    "quire_generation_tokens": ("vllm:generation_tokens",),
    "quire_requests_finished": ("vllm:request_success",),
    "quire_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "quire_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "quire_request_duration_seconds": ("vllm:e2e_request_latency_seconds",),
    "quire_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "quire_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "quire_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "quire_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "quire_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "quire_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "quire_request_generation_tokens": ("vllm:request_generation_tokens",),
}
"""vLLM's name of each metric with the same meaning, and the name in older versions of vLLM."""

_NUM_BLOCKS = "quire_kv_blocks"
_LABELS = {"reason": "finished_reason"}
_NO_SUCCESS = frozenset({"refused"})  # labels that vLLM does not count


class VLLMMetrics:
    """Metrics under vLLM's names.

    Args:
        model_name: label of all metrics.
        block_size: tokens per KV block.
    """

    def __init__(self, model_name: str, block_size: int) -> None:
        self._block_size = block_size
        self._labels = {"model_name": model_name, "engine": "0"}

    def renamed(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """Yield those of `metrics`, under Quire's names, that vLLM has, too."""
        for metric in metrics:
            for name in NAMES.get(metric.name, ()):
                yield self._renamed(metric, name)
            if metric.name == _NUM_BLOCKS:
                yield self._cache_config(int(metric.samples[0].value))
        yield self._adapters()

    def _cache_config(self, num_blocks: int) -> Metric:
        config = {"block_size": str(self._block_size), "num_gpu_blocks": str(num_blocks)}
        info = Metric("vllm:cache_config_info", "Tokens per KV block, and number of blocks.", "gauge")
        info.add_sample(info.name, {**self._labels, **config}, 1)
        return info

    def _adapters(self) -> Metric:
        """Return when which adapters were in use, seconds since 1970: there are none."""
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        info = Metric("vllm:lora_requests_info", "LoRA adapters in use, and their maximum number.", "gauge")
        info.add_sample(info.name, {**self._labels, **adapters}, time.time())
        return info

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            if sample.labels.get("reason") in _NO_SUCCESS:
                continue
            own = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            suffix = sample.name.removeprefix(metric.name)
            renamed.add_sample(name + suffix, {**self._labels, **own}, sample.value)
        return renamed
