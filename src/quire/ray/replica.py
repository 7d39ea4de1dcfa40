"""An engine replica on Ray Serve: an engine with its front, which listens on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.applications import Starlette

from quire.config import EngineConfig, KVEventsConfig, ServerConfig
from quire.errors import ConfigError
from quire.front.async_llm import AsyncLLM
from quire.server.app import create_app
from quire.server.batches.directory import BatchDirectory, DirectoryInUseError
from quire.server.context import ServerContext
from quire.server.http.connections import raise_descriptor_limit
from quire.server.http.listening import bound_socket, url_of
from quire.server.http.server import HttpServer
from quire.server.http.stopping import cancelled_at_end
from quire.server.monitoring.engine_probes import current_stats
from quire.server.serve import (
    close_state,
    drain,
    start_state,
    tracing_of,
    watch_key_file,
    with_events_topic,
)


class QuireServer:
    """A replica of an engine, whose constructor returns when it is ready.

    Args:
        engine: configuration of the engine; ports and addresses are replaced by those of the replica.
        server: configuration of its HTTP server, which listens on a free port of the node's address.
        is_behind_ingress: whether only the ingress, which gets a key of the replica, may call it; unless
            `server` has keys of clients, which then come through the ingress.

    Raises:
        QuireError: the engine could not be built.
    """

    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, server: ServerConfig, *, is_behind_ingress: bool = False
    ) -> None:
        raise_descriptor_limit()
        is_open = is_behind_ingress and not (server.api_key or server.api_keys_file)
        self._key = secrets.token_urlsafe() if is_open else ""
        self._host = ray.util.get_node_ip_address()
        server = dataclasses.replace(server, host=self._host, port=0, api_key=self._key or server.api_key)
        async with contextlib.AsyncExitStack() as stack:
            bound = stack.enter_context(contextlib.closing(bound_socket(self._host, 0)))
            self._url = url_of(self._host, bound)
            directory = _free_directory(server.batches.batch_dir)
            await _share_gpus()
            llm = AsyncLLM(with_events_topic(self._own(engine), server, bound.getsockname()[1]))
            stack.push_async_callback(llm.shutdown)
            await llm.wait_until_ready()
            self._app = create_app(llm, server, tracing=tracing_of(server), batch_directory=directory)
            await start_state(self._app)
            stack.push_async_callback(close_state, self._app)
            watching = watch_key_file(self._context.tenants, asyncio.Event())
            await stack.enter_async_context(cancelled_at_end(watching))
            await stack.enter_async_context(HttpServer(self._app, server.connections).serving(bound))
            self._running = stack.pop_all()

    @property
    def _context(self) -> ServerContext:
        context: ServerContext = self._app.state.context
        return context

    def _own(self, engine: EngineConfig) -> EngineConfig:
        """Return the configuration with addresses of this replica."""
        anywhere = self._own_address(0)
        events = KVEventsConfig(
            kv_events_endpoint=anywhere,
            kv_events_replay_endpoint=anywhere,
            kv_events_topic=engine.kv_events.kv_events_topic,
        )
        transfer = dataclasses.replace(engine.kv_transfer, kv_transfer_host=self._host)
        return dataclasses.replace(engine, kv_events=events, kv_transfer=transfer)

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application, with all APIs."""
        return self._app

    async def check_health(self) -> None:
        """Return while the engine works, or another takes its place; a busy one is healthy.

        Raises:
            QuireError: the engine has ended, and no other one is started.
        """
        if (failure := self._context.llm.failure) is not None:
            raise failure

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return where the ingress finds the engine, with which key, and its role."""
        role = self._context.llm.info.role
        return {"url": self._url, "key": self._key, "role": role, "model": self._context.model_name}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the engine's load, and where it publishes its KV events, for Ray's `KVAwareRouter`."""
        stats, _ = await current_stats(self._context)
        info = self._context.llm.info
        load = (
            {}
            if stats is None
            else {
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "kv_cache_usage": stats.kv_cache_usage,
            }
        )
        if info.kv_events_ports is None:
            return load
        live, replay = (self._own_address(port) for port in info.kv_events_ports)
        return load | {
            "kv_event_metadata": {
                "endpoint": live,
                "replay_endpoint": replay,
                "block_size": info.block_size,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "dp_rank": 0,
            }
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `LoadPolicy` reads: the work that waits, in tokens and seconds, and the KV in use."""
        llm = self._context.llm
        stats, _ = await current_stats(self._context)
        tokens, age = llm.prompt_backlog()
        return {
            "queued_prompt_tokens": float(tokens),
            "oldest_wait_seconds": age,
            "kv_cache_usage": 0.0 if stats is None else stats.kv_cache_usage,
        }

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Change what can change without a new replica.

        Args:
            user_config: `log_level`, the name of a level; and `paused`, whether requests are kept where they
                are. What is left out has its default: INFO, and not paused.

        Raises:
            ConfigError: it has another name, or an invalid value.
        """
        wanted = _run_time_config(user_config)
        logging.getLogger("quire").setLevel(wanted.log_level)
        llm = self._context.llm
        if wanted.paused:
            await llm.pause_generation("keep", clear_cache=False)
        else:
            await llm.resume_generation()

    async def __del__(self) -> None:
        """End it, once its requests have ended or `drain_timeout` has passed; others go elsewhere."""
        await drain(self._context.contexts, asyncio.Event())
        await self._running.aclose()

    def _own_address(self, port: int) -> str:
        return f"tcp://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"


def _free_directory(path: str) -> BatchDirectory | None:
    """Open the first directory below `path` that no other replica uses, which an ended one may have left.

    Raises:
        ConfigError: it cannot be used.
    """
    if not path:
        return None
    for number in itertools.count():
        with contextlib.suppress(DirectoryInUseError):
            return BatchDirectory(os.path.join(path, str(number)))
    raise AssertionError


async def _share_gpus() -> None:
    """Have the engine's ranks, which are processes of this replica, see the GPUs of all of its bundles.

    Ray shows a replica those of the first bundle only, and tells the others' to whatever runs in them.

    Raises:
        ConfigError: the bundles are on several machines.
    """

    def gpus() -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    group = get_current_placement_group()
    bundles = [] if group is None else group.bundle_specs[1:]
    of_others = await asyncio.gather(
        *(
            ray.remote(gpus)
            .options(
                num_cpus=0,
                num_gpus=bundle["GPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
            for index, bundle in enumerate(bundles, start=1)
            if bundle.get("GPU")
        )
    )
    if of_others:
        node, own = gpus()
        if any(other != node for other, _ in of_others):
            raise ConfigError(
                "placement_group_bundles are on several machines, but the ranks of an engine are processes "
                "of one; set placement_group_strategy to STRICT_PACK"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *(gpu for _, ids in of_others for gpu in ids)])


class _RunTimeConfig(msgspec.Struct, forbid_unknown_fields=True):
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    paused: bool = False


def _run_time_config(given: Mapping[str, Any]) -> _RunTimeConfig:
    try:
        return msgspec.convert(given, _RunTimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"user_config is invalid: {error}; it may hold {' and '.join(_RunTimeConfig.__struct_fields__)}, "
            "everything else needs new replicas: change the arguments of the application"
        ) from None
