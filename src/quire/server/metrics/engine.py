"""The engine's statistics, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.front.process.resumption import RecoveryStats
from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
from quire.scheduling.outputs import SchedulerStats
from quire.step import GraphStats

Row = tuple[str, str, str]
"""Name of a metric, the field with its value, and its meaning."""


def _rows(*rows: str) -> tuple[Row, ...]:
    """Return rows that are written as `name field: meaning`."""
    split = (row.split(" ", 2) for row in rows)
    return tuple((name, field.removesuffix(":"), meaning) for name, field, meaning in split)


_GAUGES = _rows(
    "quire_requests_running num_running: Number of requests in the running batch.",
    "quire_requests_waiting num_waiting: Number of requests that are not running, for any reason.",
    "quire_requests_awaiting num_awaiting: Number of waiting requests whose grammar is being compiled or "
    "KV looked up or loaded.",
    "quire_kv_cache_usage_ratio kv_cache_usage: Fraction of KV blocks held by requests, pins and transfers "
    "(0 to 1).",
    "quire_kv_blocks num_blocks: Total number of KV blocks, without those that sliding windows have of their "
    "own.",
    "quire_kv_blocks_free num_free_blocks: Number of KV blocks that are free, or idle in the prefix cache.",
    "quire_kv_blocks_idle num_idle_blocks: Number of free KV blocks that the prefix cache still finds.",
    "quire_kv_blocks_leased num_leased_blocks: Number of KV blocks held by pins and transfers.",
    "quire_policies_replaced num_replaced_policies: Number of policies that have failed, so that the "
    "default has taken their place.",
)

_COUNTERS = _rows(
    "quire_engine_steps num_steps: Number of engine steps.",
    "quire_scheduled_tokens num_scheduled_tokens: Number of tokens computed in all steps.",
    "quire_preemptions num_preemptions: Number of times that a running request went back to the queue: for "
    "lack of KV blocks, for the turn of others, or because a step had failed.",
    "quire_prefix_cache_queried_tokens prefix_queried_tokens: Number of prompt tokens looked up in the "
    "prefix cache, once for all sequences of a request.",
    "quire_prefix_cache_hit_tokens prefix_hit_tokens: Number of prompt tokens found in the prefix cache.",
    "quire_prefix_cache_evicted_blocks prefix_evicted_blocks: Number of idle KV blocks whose content has "
    "made room for other content.",
    "quire_prefix_cache_resumed_queried_tokens resumed_queried_tokens: Number of tokens of preempted "
    "requests looked up in the prefix cache.",
    "quire_prefix_cache_resumed_hit_tokens resumed_hit_tokens: Number of tokens of preempted requests "
    "found in the prefix cache.",
    "quire_draft_tokens num_draft_tokens: Number of draft tokens that were verified.",
    "quire_accepted_draft_tokens num_accepted_tokens: Number of draft tokens that were accepted.",
    "quire_kv_blocks_evicted num_evicted_blocks: Number of KV blocks that running sequences have evicted "
    "(use_cache_eviction).",
    "quire_timeouts num_timeouts: Number of requests that timed out in the scheduler.",
    "quire_loaded_kv_tokens num_loaded_tokens: Number of tokens whose KV was loaded instead of computed.",
    "quire_failed_kv_loads num_failed_loads: Number of KV loads that failed or never arrived.",
)

_RECOVERY_COUNTERS = _rows(
    "quire_engine_restarts num_restarts: Number of engine restarts.",
    "quire_engine_hangs num_hangs: Number of engines killed because they did not finish a step "
    "(watchdog_timeout).",
    "quire_requests_resumed num_resumed_requests: Number of requests continued on another engine, "
    "counted once per engine.",
    "quire_requests_quarantined num_quarantined_requests: Number of requests ended because they seem to "
    "crash engines.",
)

_GRAPH_GAUGES = _rows(
    "quire_gpu_graphs num_graphs: Number of captured CUDA graphs.",
)

_GRAPH_COUNTERS = _rows(
    "quire_gpu_graph_failures num_failures: Number of failed CUDA graph captures.",
)

_TIER_GAUGES = _rows(
    "quire_kv_tier_capacity_bytes capacity_bytes: Maximum size of the KV tier.",
    "quire_kv_tier_stored_bytes stored_bytes: Bytes of KV that the tier stores.",
    "quire_kv_tier_stored_blocks num_stored_blocks: Number of blocks that the tier stores.",
    "quire_kv_tier_load_seconds_per_block load_seconds_per_block: Seconds to load one block from the tier, "
    "a moving average.",
    "quire_kv_tier_compute_seconds_per_token compute_seconds_per_token: Seconds to compute the KV of one "
    "prompt token, a moving average.",
)

_TIER_COUNTERS = _rows(
    "quire_kv_tier_loads_chosen num_loads_chosen: Number of prefixes found in the tier and loaded.",
    "quire_kv_tier_computations_chosen num_computations_chosen: Number of prefixes found in the tier, but "
    "computed because that was faster.",
    "quire_kv_tier_loaded_blocks num_loaded_blocks: Number of blocks loaded from the tier.",
    "quire_kv_tier_memory_hits num_memory_hits: Number of blocks read from the memory in front of the disk.",
    "quire_kv_tier_failed_reads num_failed_reads: Number of blocks found damaged, overwritten or "
    "unreadable when loading.",
    "quire_kv_tier_written_blocks num_written_blocks: Number of blocks written to the tier.",
    "quire_kv_tier_failed_writes num_failed_writes: Number of blocks that could not be written to the tier.",
    "quire_kv_tier_dropped_writes num_dropped_writes: Number of blocks not stored because the writer was "
    "behind.",
    "quire_kv_tier_evicted_blocks num_evicted_blocks: Number of blocks evicted from the tier for others.",
)

_PEER_GAUGES = _rows(
    "quire_kv_peer_load_seconds_per_block load_seconds_per_block: Seconds to read one block from a peer, a "
    "moving average.",
    "quire_kv_peer_compute_seconds_per_token compute_seconds_per_token: Seconds to compute the KV of one "
    "prompt token, a moving average.",
)

_PEER_COUNTERS = _rows(
    "quire_kv_peer_lent_prompts num_lent_prompts: Number of prompts held for a peer.",
    "quire_kv_peer_loads_chosen num_loads_chosen: Number of prompts to be read from a peer.",
    "quire_kv_peer_computations_chosen num_computations_chosen: Number of prompts that a peer had, but "
    "computed because that was faster.",
    "quire_kv_peer_missing_prompts num_missing_prompts: Number of prompts computed because the peer no "
    "longer had them, or was unreachable.",
    "quire_kv_peer_failed_loads num_failed_loads: Number of prompts that could not be read from a peer.",
    "quire_kv_peer_prefix_lookups num_prefix_lookups: Number of prompts whose uncached part was looked up "
    "at peers.",
    "quire_kv_peer_prefixes_found num_prefixes_found: Number of prompts with a longer prefix at a peer.",
    "quire_kv_peer_loaded_blocks num_loaded_blocks: Number of blocks read from peers.",
    "quire_kv_peer_loaded_bytes loaded_bytes: Bytes read from peers.",
)


class EngineCollector(Collector):
    """The engine's statistics as of the last `update`."""

    def __init__(self) -> None:
        self._stats = SchedulerStats()
        self._recovery = RecoveryStats()
        self._engine_up = False

    def update(self, stats: SchedulerStats | None, recovery: RecoveryStats, *, engine_up: bool) -> None:
        """Set new statistics; None keeps the last ones."""
        self._stats = stats or self._stats
        self._recovery = recovery
        self._engine_up = engine_up

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by the registry."""
        meaning = "1 if the engine is alive and making progress."
        yield GaugeMetricFamily("quire_engine_up", meaning, value=self._engine_up)
        yield from _families(self._stats, _GAUGES, _COUNTERS)
        yield from _families(self._recovery, (), _RECOVERY_COUNTERS)
        if (graphs := self._stats.graphs) is not None:
            yield from _families(graphs, _GRAPH_GAUGES, _GRAPH_COUNTERS)
            yield _steps_by_launch(graphs)
        connector = self._stats.kv_connector
        if isinstance(connector, KVConnectorStats):
            yield from _families(connector, _TIER_GAUGES, _TIER_COUNTERS)
        elif connector is not None:
            yield from _families(connector, _PEER_GAUGES, _PEER_COUNTERS)
            yield _peers_by_transport(connector)


def _families(stats: object, gauges: Iterable[Row], counters: Iterable[Row]) -> Iterator[Metric]:
    for name, field, meaning in gauges:
        yield GaugeMetricFamily(name, meaning, value=getattr(stats, field))
    for name, field, meaning in counters:
        yield CounterMetricFamily(name, meaning, value=getattr(stats, field))


def _peers_by_transport(stats: KVPeerStats) -> Metric:
    family = GaugeMetricFamily(
        "quire_kv_peers", "Number of engines linked to, to read KV, by transport.", labels=["transport"]
    )
    for transport, number in stats.num_peers_by_transport.items():
        family.add_metric([transport], number)
    return family


def _steps_by_launch(stats: GraphStats) -> Metric:
    family = CounterMetricFamily(
        "quire_gpu_steps",
        "Number of model steps on a GPU: replayed as a CUDA graph, or launched one kernel after the other.",
        labels=["how"],
    )
    family.add_metric(["replayed"], stats.num_replayed)
    family.add_metric(["launched"], stats.num_launched)
    return family
