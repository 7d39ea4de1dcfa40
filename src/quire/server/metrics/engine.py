"""The engine's own figures, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.front.process.resumption import RecoveryStats
from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
from quire.scheduling.outputs import SchedulerStats
from quire.step import GraphStats

Row = tuple[str, str, float]
"""Name, meaning and value of a metric."""


class EngineCollector(Collector):
    """The engine's figures as of the last `update`."""

    def __init__(self) -> None:
        self._stats = SchedulerStats()
        self._recovery = RecoveryStats()
        self._engine_up = False

    def update(self, stats: SchedulerStats | None, recovery: RecoveryStats, *, engine_up: bool) -> None:
        """Take new figures; None keeps the last ones."""
        self._stats = stats or self._stats
        self._recovery = recovery
        self._engine_up = engine_up

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by the registry."""
        yield from _families(self._gauges(), self._counters())
        yield from _families((), _recovery_counters(self._recovery))
        if self._stats.graphs is not None:
            yield from _families(_graph_gauges(self._stats.graphs), _graph_counters(self._stats.graphs))
            yield _steps_by_launch(self._stats.graphs)
        connector = self._stats.kv_connector
        if isinstance(connector, KVConnectorStats):
            yield from _families(_connector_gauges(connector), _connector_counters(connector))
        elif connector is not None:
            yield from _families(_peer_gauges(connector), _peer_counters(connector))
            yield _peers_by_transport(connector)

    def _gauges(self) -> tuple[Row, ...]:
        """Return name, meaning and value of what goes up and down."""
        stats = self._stats
        return (
            ("quire_engine_up", "1 if the engine is alive and making progress.", self._engine_up),
            ("quire_requests_running", "Number of requests in the running batch.", stats.num_running),
            (
                "quire_requests_waiting",
                "Number of requests that are not running, for any reason.",
                stats.num_waiting,
            ),
            (
                "quire_requests_awaiting",
                "Number of waiting requests whose grammar is being compiled or KV looked up or loaded.",
                stats.num_awaiting,
            ),
            (
                "quire_kv_cache_usage_ratio",
                "Fraction of KV blocks held by requests, pins and transfers (0 to 1).",
                stats.kv_cache_usage,
            ),
            ("quire_kv_blocks", "Total number of KV blocks.", stats.num_blocks),
            (
                "quire_kv_blocks_free",
                "Number of KV blocks that are free, or idle in the prefix cache.",
                stats.num_free_blocks,
            ),
            (
                "quire_kv_blocks_idle",
                "Number of free KV blocks that the prefix cache still finds.",
                stats.num_idle_blocks,
            ),
            (
                "quire_kv_blocks_leased",
                "Number of KV blocks held by pins and transfers.",
                stats.num_leased_blocks,
            ),
            (
                "quire_policies_replaced",
                "Number of policies that have failed, so that the default has taken their place.",
                stats.num_replaced_policies,
            ),
        )

    def _counters(self) -> tuple[Row, ...]:
        """Return name, meaning and value of what only grows."""
        stats = self._stats
        return (
            ("quire_engine_steps", "Number of engine steps.", stats.num_steps),
            ("quire_scheduled_tokens", "Number of tokens computed in all steps.", stats.num_scheduled_tokens),
            (
                "quire_preemptions",
                "Number of times that a running request went back to the queue: for lack of KV blocks, "
                "for the turn of others, or because a step had failed.",
                stats.num_preemptions,
            ),
            (
                "quire_prefix_cache_queried_tokens",
                "Number of prompt tokens looked up in the prefix cache, once for all sequences of a request.",
                stats.prefix_queried_tokens,
            ),
            (
                "quire_prefix_cache_hit_tokens",
                "Number of prompt tokens found in the prefix cache.",
                stats.prefix_hit_tokens,
            ),
            (
                "quire_prefix_cache_evicted_blocks",
                "Number of idle KV blocks whose content has made room for other content.",
                stats.prefix_evicted_blocks,
            ),
            (
                "quire_prefix_cache_resumed_queried_tokens",
                "Number of tokens of preempted requests looked up in the prefix cache.",
                stats.resumed_queried_tokens,
            ),
            (
                "quire_prefix_cache_resumed_hit_tokens",
                "Number of tokens of preempted requests found in the prefix cache.",
                stats.resumed_hit_tokens,
            ),
            ("quire_draft_tokens", "Number of draft tokens that were verified.", stats.num_draft_tokens),
            (
                "quire_accepted_draft_tokens",
                "Number of draft tokens that were accepted.",
                stats.num_accepted_tokens,
            ),
            (
                "quire_kv_blocks_evicted",
                "Number of KV blocks that running sequences have evicted (use_cache_eviction).",
                stats.num_evicted_blocks,
            ),
            (
                "quire_timeouts",
                "Number of requests that timed out in the scheduler.",
                stats.num_timeouts,
            ),
            (
                "quire_loaded_kv_tokens",
                "Number of tokens whose KV was loaded instead of computed.",
                stats.num_loaded_tokens,
            ),
            (
                "quire_failed_kv_loads",
                "Number of KV loads that failed or never arrived.",
                stats.num_failed_loads,
            ),
        )


def _recovery_counters(stats: RecoveryStats) -> tuple[Row, ...]:
    return (
        ("quire_engine_restarts", "Number of engines started in place of others.", stats.num_restarts),
        (
            "quire_engine_hangs",
            "Number of engines killed because they did not finish a step (watchdog_timeout).",
            stats.num_hangs,
        ),
        (
            "quire_requests_resumed",
            "Number of requests that went on in another engine, counted once for each.",
            stats.num_resumed_requests,
        ),
        (
            "quire_requests_quarantined",
            "Number of requests that ended because engines had died of them.",
            stats.num_quarantined_requests,
        ),
    )


def _connector_gauges(stats: KVConnectorStats) -> tuple[Row, ...]:
    return (
        ("quire_kv_tier_capacity_bytes", "Maximum size of the KV tier.", stats.capacity_bytes),
        ("quire_kv_tier_stored_bytes", "Bytes of KV that the tier stores.", stats.stored_bytes),
        ("quire_kv_tier_stored_blocks", "Number of blocks that the tier stores.", stats.num_stored_blocks),
        (
            "quire_kv_tier_load_seconds_per_block",
            "Seconds to load one block from the tier, a moving average.",
            stats.load_seconds_per_block,
        ),
        (
            "quire_kv_tier_compute_seconds_per_token",
            "Seconds to compute the KV of one prompt token, a moving average.",
            stats.compute_seconds_per_token,
        ),
    )


def _connector_counters(stats: KVConnectorStats) -> tuple[Row, ...]:
    return (
        (
            "quire_kv_tier_loads_chosen",
            "Number of prefixes found in the tier and loaded.",
            stats.num_loads_chosen,
        ),
        (
            "quire_kv_tier_computations_chosen",
            "Number of prefixes found in the tier, but computed because that was faster.",
            stats.num_computations_chosen,
        ),
        ("quire_kv_tier_loaded_blocks", "Number of blocks loaded from the tier.", stats.num_loaded_blocks),
        (
            "quire_kv_tier_memory_hits",
            "Number of blocks read from the memory in front of the disk.",
            stats.num_memory_hits,
        ),
        (
            "quire_kv_tier_failed_reads",
            "Number of blocks that were damaged, overwritten or unreadable when they were to be loaded.",
            stats.num_failed_reads,
        ),
        ("quire_kv_tier_written_blocks", "Number of blocks written to the tier.", stats.num_written_blocks),
        (
            "quire_kv_tier_failed_writes",
            "Number of blocks that could not be written to the tier.",
            stats.num_failed_writes,
        ),
        (
            "quire_kv_tier_dropped_writes",
            "Number of blocks not stored because the writer was behind.",
            stats.num_dropped_writes,
        ),
        (
            "quire_kv_tier_evicted_blocks",
            "Number of blocks evicted from the tier for others.",
            stats.num_evicted_blocks,
        ),
    )


def _peer_gauges(stats: KVPeerStats) -> tuple[Row, ...]:
    return (
        (
            "quire_kv_peer_load_seconds_per_block",
            "Seconds to read one block from a peer, a moving average.",
            stats.load_seconds_per_block,
        ),
        (
            "quire_kv_peer_compute_seconds_per_token",
            "Seconds to compute the KV of one prompt token, a moving average.",
            stats.compute_seconds_per_token,
        ),
    )


def _peer_counters(stats: KVPeerStats) -> tuple[Row, ...]:
    return (
        ("quire_kv_peer_lent_prompts", "Number of prompts held for a peer.", stats.num_lent_prompts),
        (
            "quire_kv_peer_loads_chosen",
            "Number of prompts to be read from a peer.",
            stats.num_loads_chosen,
        ),
        (
            "quire_kv_peer_computations_chosen",
            "Number of prompts that a peer had, but computed because that was faster.",
            stats.num_computations_chosen,
        ),
        (
            "quire_kv_peer_missing_prompts",
            "Number of prompts computed because the peer had them no more, or could not be reached.",
            stats.num_missing_prompts,
        ),
        (
            "quire_kv_peer_failed_loads",
            "Number of prompts whose reading from a peer failed.",
            stats.num_failed_loads,
        ),
        (
            "quire_kv_peer_prefix_lookups",
            "Number of prompts whose part that is not cached peers were asked for.",
            stats.num_prefix_lookups,
        ),
        (
            "quire_kv_peer_prefixes_found",
            "Number of prompts that a peer had cached more of.",
            stats.num_prefixes_found,
        ),
        ("quire_kv_peer_loaded_blocks", "Number of blocks read from peers.", stats.num_loaded_blocks),
        ("quire_kv_peer_loaded_bytes", "Bytes read from peers.", stats.loaded_bytes),
    )


def _peers_by_transport(stats: KVPeerStats) -> Metric:
    family = GaugeMetricFamily(
        "quire_kv_peers", "Number of engines linked to, to read KV, by transport.", labels=["transport"]
    )
    for transport, number in stats.num_peers_by_transport.items():
        family.add_metric([transport], number)
    return family


def _graph_gauges(stats: GraphStats) -> tuple[Row, ...]:
    return (("quire_gpu_graphs", "Number of recorded steps (CUDA graphs) that are kept.", stats.num_graphs),)


def _graph_counters(stats: GraphStats) -> tuple[Row, ...]:
    return (
        (
            "quire_gpu_graph_failures",
            "Number of steps that could not be recorded as a CUDA graph.",
            stats.num_failures,
        ),
    )


def _steps_by_launch(stats: GraphStats) -> Metric:
    family = CounterMetricFamily(
        "quire_gpu_steps",
        "Number of model steps on a GPU: replayed as a CUDA graph, or launched one kernel after the other.",
        labels=["how"],
    )
    family.add_metric(["replayed"], stats.num_replayed)
    family.add_metric(["launched"], stats.num_launched)
    return family


def _families(gauges: Iterable[Row], counters: Iterable[Row]) -> Iterator[Metric]:
    for name, meaning, value in gauges:
        yield GaugeMetricFamily(name, meaning, value=value)
    for name, meaning, value in counters:
        yield CounterMetricFamily(name, meaning, value=value)
