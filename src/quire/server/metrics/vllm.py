"""Figures under vLLM's names, for the dashboards and autoscalers that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

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
"""vLLM's name of each metric that means the same there, and the name that an older vLLM had for it."""

_LABELS = {"reason": "finished_reason"}
_NO_SUCCESS = frozenset({"refused"})  # reasons that vLLM does not count


class VLLMMetrics(Collector):
    """The metrics of another registry as vLLM would have them.

    Args:
        source: has the metrics under Quire's names.
        model_name: label of all.
    """

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by the registry."""
        for metric in self._source.collect():
            for name in NAMES.get(metric.name, ()):
                yield self._renamed(metric, name)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            if sample.labels.get("reason") in _NO_SUCCESS:
                continue
            own = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            suffix = sample.name.removeprefix(metric.name)
            renamed.add_sample(name + suffix, {**self._labels, **own}, sample.value)
        return renamed
