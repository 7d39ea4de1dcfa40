"""How many engines Ray Serve runs, by the work that waits for them.

Ray pickles this module by value: it imports nothing that Ray's controller may lack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_RATIO = 2.0
"""Maximum factor of one decision."""


class LoadPolicy:
    """Scales engines to a load of about 1: the largest of three shares of a target.

    Ray applies the bounds, the delays and the factors of `AutoscalingConfig` to what it returns.

    Args:
        target_queued_tokens: prompt tokens of requests without a first token, for each engine.
        target_kv_usage: share of the KV blocks in use, average of the engines, 0 to 1.
        target_wait: seconds that a request may wait for its first token, the longest of all.
    """

    def __init__(
        self, target_queued_tokens: float = 4096.0, target_kv_usage: float = 0.7, target_wait: float = 5.0
    ) -> None:
        if not (target_queued_tokens > 0 and 0 < target_kv_usage <= 1 and target_wait > 0):
            raise ValueError(
                f"target_queued_tokens is {target_queued_tokens}, target_kv_usage {target_kv_usage} and "
                f"target_wait {target_wait}; all must be above 0, and target_kv_usage at most 1"
            )
        self._targets = {
            "queued_prompt_tokens": target_queued_tokens,
            "kv_cache_usage": target_kv_usage,
            "oldest_wait_seconds": target_wait,
        }

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of engines, and no state.

        Args:
            context: Ray's `AutoscalingContext`; its metrics are those of
                `QuireServer.record_autoscaling_stats`.
        """
        metrics = context.aggregated_metrics or {}
        known = [values for name in self._targets if (values := metrics.get(name))]
        if not known:  # they have not been reported yet
            return context.target_num_replicas, {}
        return math.ceil(round(context.current_num_replicas * self._ratio(metrics), 6)), {}

    def _ratio(self, metrics: Mapping[str, Mapping[Any, float]]) -> float:
        """Return the load of an engine, of which 1 is the target."""
        loads = [0.0]
        for name, target in self._targets.items():
            values = list((metrics.get(name) or {}).values())
            if values:
                # A request that waits too long wants another engine, even if the others have nothing to do.
                load = max(values) if name == "oldest_wait_seconds" else sum(values) / len(values)
                loads.append(load / target)
        return min(max(loads), MAX_RATIO)
