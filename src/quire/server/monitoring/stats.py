"""/stats: current statistics of the engine and the server, small enough for frequent polling."""

from __future__ import annotations

import collections
import itertools
import time

from msgspec import Struct
from prometheus_client import Counter
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.scheduling.outputs import SchedulerStats
from quire.server.context import ServerContext, contexts_of, tenant_of
from quire.server.monitoring.engine_probes import current_stats
from quire.server.tenancy.tenants import Tenant
from quire.server.wire.answers import json_response

MAX_LISTED_TENANTS = 100


class RequestCounts(Struct, kw_only=True):
    """Sequences in the engine; `awaiting` wait for a grammar or KV. `preempted` is a counter."""

    running: int
    waiting: int
    awaiting: int
    preempted: int


class BlockCounts(Struct, kw_only=True):
    """KV blocks, `free` or in use; `idle` ones are free, but still in the prefix cache.

    `leased` are held by pins and transfers. `evicted` is a counter of evicted idle blocks.
    """

    total: int
    free: int
    idle: int
    leased: int
    evicted: int


class TokenCounts(Struct, kw_only=True):
    """Tokens since the start: in prompts, generated, looked up in the prefix cache, and found there."""

    prompt: int
    generated: int
    looked_up: int
    cached: int


class LatencyHistogram(Struct, kw_only=True):
    """Histogram of latencies since the start; `bounds` are in seconds, the last count is above all."""

    bounds: list[float]
    counts: list[int]


class TenantStats(Struct, kw_only=True):
    """A tenant's live calls, and what is left of its limits per minute (null: no limit)."""

    name: str
    calls: int
    requests_left: int | None
    tokens_left: int | None


class Stats(Struct, kw_only=True):
    """Answer of /stats. `time`, in seconds, is of a monotonic clock, for rates."""

    model: str
    version: str
    time: float
    engine_up: bool
    requests: RequestCounts
    kv_blocks: BlockCounts
    tokens: TokenCounts
    time_to_first_token: LatencyHistogram
    inter_token_latency: LatencyHistogram
    tenants: list[TenantStats]


async def get_stats(request: Request) -> Response:
    """Return statistics of one model, the first or `model`, and of the tenants that the caller may see."""
    context, *_ = contexts_of(request)
    engine, engine_up = await current_stats(context)
    engine = engine or SchedulerStats()
    metrics = context.metrics
    stats = Stats(
        model=context.model_name,
        version=context.version,
        time=time.monotonic(),
        engine_up=engine_up,
        requests=RequestCounts(
            running=engine.num_running,
            waiting=engine.num_waiting,
            awaiting=engine.num_awaiting,
            preempted=engine.num_preemptions,
        ),
        kv_blocks=BlockCounts(
            total=engine.num_blocks,
            free=engine.num_free_blocks,
            idle=engine.num_idle_blocks,
            leased=engine.num_leased_blocks,
            evicted=engine.prefix_evicted_blocks,
        ),
        tokens=TokenCounts(
            prompt=_total(metrics.prompt_tokens),
            generated=_total(metrics.generation_tokens),
            looked_up=engine.prefix_queried_tokens,
            cached=engine.prefix_hit_tokens,
        ),
        time_to_first_token=_latencies(metrics.time_to_first_token),
        inter_token_latency=_latencies(metrics.inter_token_latency),
        tenants=_tenants(context, tenant_of(request)),
    )
    return json_response(stats)


def _total(counter: Counter) -> int:
    """Return a counter's value, over all labels."""
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def _latencies(histogram: Collector) -> LatencyHistogram:
    """Return a histogram, over all labels."""
    cumulative: collections.Counter[float] = collections.Counter()
    for metric in histogram.collect():
        for sample in metric.samples:
            if "le" in sample.labels:
                cumulative[float(sample.labels["le"])] += int(sample.value)
    *bounds, _ = sorted(cumulative)
    counts, below = [], 0
    for bound in sorted(cumulative):
        counts.append(cumulative[bound] - below)
        below = cumulative[bound]
    return LatencyHistogram(bounds=bounds, counts=counts)


def _tenants(context: ServerContext, tenant: Tenant) -> list[TenantStats]:
    """Return the busiest tenants visible to `tenant`; none without a key file."""
    known = context.tenants.separate if tenant.sees_all else (tenant,)
    live = itertools.chain.from_iterable(each.calls.by_id for each in context.contexts)
    num_calls = collections.Counter(engine_id.partition(":")[0] for engine_id in live)
    shown = sorted(known, key=lambda one: num_calls[one.name], reverse=True)
    return [
        TenantStats(
            name=one.name,
            calls=num_calls[one.name],
            requests_left=one.usage.requests_left,
            tokens_left=one.usage.tokens_left,
        )
        for one in shown[:MAX_LISTED_TENANTS]
    ]
