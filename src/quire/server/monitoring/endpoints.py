"""Endpoints for monitoring: health, metrics, and engine description."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext, context_of, contexts_of
from quire.server.monitoring.engine_probes import current_stats, health_of
from quire.server.monitoring.stats import Stats, get_stats
from quire.server.wire.answers import (
    EngineDescription,
    Health,
    KVEventSource,
    KVTransferAddress,
    Version,
    WorldSize,
    json_response,
)
from quire.server.wire.openapi import Endpoint
from quire.server.wire.paths import READINESS_PATHS


async def health(request: Request) -> Response:
    """Answer 200 if requests of all models can be served, or those of `model`; else 503 with the reason."""
    health = health_of(contexts_of(request))
    return json_response(health, 200 if health.status == "ok" else 503)


async def live(request: Request) -> Response:
    """Answer 200: the server is alive, regardless of its engines."""
    return json_response(Health(status="ok"))


async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format, for an admin with those of each tenant."""
    context = context_of(request)
    sender = context.tenants.of_headers(request.headers)
    for each in context.contexts:
        stats, engine_up = await current_stats(each)
        each.metrics.engine.update(stats, each.llm.recovery_stats, engine_up=engine_up)
    first, *others = (each.metrics for each in context.contexts)
    of_tenants = sender is not None and sender.sees_all
    exposition = first.exposition(of_tenants=of_tenants, others=others)
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


async def engine(request: Request) -> Response:
    """Describe the engines of all models, the first one's on top, or that of `model`, for a router."""
    described, *others = [await _description(each) for each in contexts_of(request)]
    described.models = [card for each in context_of(request).contexts for card in each.model_cards]
    if others:
        described.others = others
    return json_response(described)


async def _description(context: ServerContext) -> EngineDescription:
    info = context.llm.info
    address, ports = info.kv_transfer_address, info.kv_events_ports
    return EngineDescription(
        role=info.role,
        model=context.model_name,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        kv_transfer=None if address is None else KVTransferAddress(host=address[0], port=address[1]),
        kv_events=None if ports is None else await asyncio.to_thread(_kv_event_source, context, *ports),
        models=context.model_cards,
    )


def _kv_event_source(context: ServerContext, port: int, replay_port: int) -> KVEventSource:
    return KVEventSource(
        port=port,
        replay_port=replay_port,
        tokenizer=context.llm.tokenizer.fingerprint,
        prompts=context.prompt_digest,
    )


async def version(request: Request) -> Response:
    """Return Quire's version."""
    return json_response(Version(version=context_of(request).version))


async def world_size(request: Request) -> Response:
    """Return the number of the engine's ranks: that of the first model, or of `model`."""
    context, *_ = contexts_of(request)
    return json_response(WorldSize(world_size=context.llm.config.tensor_parallel_size))


MONITORING_ENDPOINTS = (
    *(
        Endpoint(
            "GET",
            path,
            health,
            Health,
            errors={503: "The engine is not available, or the server is shutting down."},
            failure=Health,
        )
        for path in READINESS_PATHS
    ),
    Endpoint("GET", "/live", live, Health),
    Endpoint("GET", "/metrics", metrics, None),
    Endpoint("GET", "/stats", get_stats, Stats),
    Endpoint("GET", "/engine", engine, EngineDescription),
    Endpoint("GET", "/version", version, Version),
    Endpoint("GET", "/get_world_size", world_size, WorldSize),
)
