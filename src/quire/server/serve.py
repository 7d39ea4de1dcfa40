"""`serve`: runs a server until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ServerConfig
from quire.config.server import OF_MODEL
from quire.errors import ConfigError, CrashLoopError, QueueFullError, QuireError, RequestTimeoutError
from quire.front.process.launch import started_ahead
from quire.server.http.connections import raise_descriptor_limit
from quire.server.http.listening import Listener, listener
from quire.server.http.stopping import StopSignals, announce_stop, cancelled_at_end, finished_unless_set
from quire.server.monitoring.port import monitoring_socket
from quire.server.wire.access_log import access_log

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from quire.front.async_llm import AsyncLLM
    from quire.models.text.tokenizer import Tokenizer
    from quire.server.batches.directory import BatchDirectory
    from quire.server.context import ServerContext
    from quire.server.metrics.tracing import Tracing
    from quire.server.tenancy.tenants import Tenants

_COLLECTION_THRESHOLDS = (700, 10, 100)  # Python's defaults, but with fewer full collections
_END_TIMEOUT = 0.5  # seconds for the engine to exit after the last answers


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    others: Sequence[tuple[EngineConfig, ServerConfig]] = (),
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish and return.

    A second signal stops at once. Call it from the main thread.

    Args:
        engine_config: configuration of the engine.
        server_config: configuration of the HTTP server.
        others: those of more models, each with an engine of its own. The server's may differ in the fields
            `OF_MODEL`. Engines start one after the other, as each plans with the memory that is left.

    Raises:
        ConfigError: the server cannot listen at the address; its certificate, key file or tracing is
            unusable; the engine's configuration cannot work; or models cannot be told apart.
        ModelError: the model cannot be found or read.
        EngineDeadError: the engine did not start.
        CrashLoopError: engines kept crashing while the server ran.
    """
    models = [(engine_config, server_config), *others]
    if others:
        _require_distinct(models)
    raise_descriptor_limit()  # before the engine process starts: it inherits the limit
    tenants = _tenants(server_config)
    tracing = tracing_of(server_config)
    batch_directory = _batch_directory(server_config)
    with (
        started_ahead(len(models)),
        listener(server_config.host, server_config.port, server_config.edge) as listening,
        monitoring_socket(server_config.host, server_config.edge.monitoring_port) as monitoring,
        access_log(server_config.edge.access_log) as log,
    ):
        print(f"Loading {', '.join(engine.model for engine, _ in models)} ...", file=sys.stderr, flush=True)
        port = server_config.port or listening.socket.getsockname()[1]
        engines = [with_events_topic(engine, server, port) for engine, server in models]
        llms = [_started(engines[0])]  # outside the event loop: Ctrl-C must be able to end a download

        import quire.server.http.server  # noqa: F401 - slow, too
        from quire.models.checkpoints.engine_files import resolve_files
        from quire.server.app import api_documents, create_app
        from quire.server.sampling_defaults import read_sampling_defaults

        api_documents(server_config.root_path)  # so that they are ready when the engine is
        paths = [llms[0].model_path, *(resolve_files(engine)[0] for engine in engines[1:])]
        defaults = [
            read_sampling_defaults(server, path) for (_, server), path in zip(models, paths, strict=True)
        ]
        for each in filter(str, defaults):
            print(f"Defaults of requests: {each}", file=sys.stderr, flush=True)

        def make_app() -> Starlette:
            servers = [server for _, server in models]
            return create_app(
                llms[0],
                server_config,
                tenants,
                log,
                defaults[0],
                tracing=tracing,
                batch_directory=batch_directory,
                others=list(zip(llms, servers, defaults, strict=True))[1:],
            )

        import uvloop

        stop = StopSignals(server_config.drain_timeout, takes_hangup=tenants is not None)
        uvloop.run(_serve_until_stopped(llms, engines, make_app, listening, monitoring, stop=stop))


def _require_distinct(models: Sequence[tuple[EngineConfig, ServerConfig]]) -> None:
    """Raise `ConfigError` if models have a name or a file in common, or differ in what is the server's."""
    from quire.server.wire.answers import LATEST

    shared = models[0][1]
    taken: set[str] = set()
    for engine, server in models:
        for name in {field.name for field in dataclasses.fields(ServerConfig)}.difference(OF_MODEL):
            if getattr(server, name) != getattr(shared, name):
                raise ConfigError(
                    f"ServerConfig.{name} of {engine.model} is not that of {models[0][0].model}; set it for "
                    "all models"
                )
        names = dict.fromkeys(
            name.removesuffix(LATEST) for name in server.served_model_name or (engine.model,)
        )
        for name in [*names, *filter(None, [engine.record_path])]:
            if name in taken:
                raise ConfigError(
                    f"two models have the same ServerConfig.served_model_name or EngineConfig.record_path, "
                    f"{name!r:.80}; give each one of its own, below models in the file of --config"
                )
            taken.add(name)


def _started(config: EngineConfig) -> AsyncLLM:
    """Start an engine, and the renderer of its model's chat template."""
    from quire.front.async_llm import AsyncLLM  # slow: the engine process is already running

    llm = AsyncLLM(config)
    threading.Thread(target=_try_chat_template, args=(llm.tokenizer,), daemon=True).start()
    return llm


def with_events_topic(config: EngineConfig, server: ServerConfig, port: int) -> EngineConfig:
    """Return the configuration with a topic of KV events that names the server, unless there is one.

    Args:
        config: the configuration of the server's engine.
        server: the server's configuration.
        port: the port that it listens on.
    """
    host = socket.gethostname() if server.host in ("", "0.0.0.0", "::") else server.host
    model = server.served_model_name[0] if server.served_model_name else config.model
    topic = config.kv_events.topic_of(f"{host}:{port}", model)
    return dataclasses.replace(config, kv_events=dataclasses.replace(config.kv_events, kv_events_topic=topic))


def _try_chat_template(tokenizer: Tokenizer) -> None:
    """Start the renderer of the model's chat template, if any; warn if it fails.

    On a busy machine it may have had no time; requests then try again.
    """
    if not tokenizer.has_chat_template:
        return
    try:
        tokenizer.check_chat_template()
    except (QueueFullError, RequestTimeoutError) as error:
        print(f"Warning: the chat template has not been tried: {error}", file=sys.stderr, flush=True)
    except QuireError as error:
        print(f"Warning: chat requests will be refused: {error}", file=sys.stderr, flush=True)


def _tenants(config: ServerConfig) -> Tenants | None:
    """Read the key file, if any, before anything slow starts."""
    if not config.api_keys_file:
        return None
    from quire.server.tenancy.tenants import Tenants

    return Tenants(config.api_key, config.api_keys_file)


def tracing_of(config: ServerConfig) -> Tracing | None:
    """Return the tracing of calls, if configured.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if not config.otlp_traces_endpoint:
        return None
    try:
        from quire.server.metrics.tracing import tracing_to
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ServerConfig.otlp_traces_endpoint needs the module {error.name}, which is not installed; "
            "it comes with pip install 'quire[otel]'"
        ) from None
    return tracing_to(config.otlp_traces_endpoint)


def _batch_directory(config: ServerConfig) -> BatchDirectory | None:
    """Open the directory of batches, if any, before anything slow starts."""
    if not config.batches.batch_dir:
        return None
    from quire.server.batches.directory import opened_directory

    return opened_directory(config)


async def _serve_until_stopped(
    llms: list[AsyncLLM],
    engines: Sequence[EngineConfig],
    make_app: Callable[[], Starlette],
    listening: Listener,
    monitoring: socket.socket | None,
    *,
    stop: StopSignals,
) -> None:
    """Wait for all engines, of which `llms` has the first, serve until a stop signal, let requests finish."""
    with stop.installed():
        try:
            if await finished_unless_set(stop.graceful, _all_ready(llms, engines)):
                app = make_app()
                await start_state(app)
                spare_full_collections()
                contexts = app.state.context.contexts
                async with listening.with_current_certificate(), _monitored(contexts, monitoring):
                    await _serve_engines(app, listening, stop)
                    await close_state(app)
        finally:
            end_timeout = 0.0 if stop.immediate.is_set() else _END_TIMEOUT
            await asyncio.gather(*(llm.shutdown(end_timeout=end_timeout) for llm in llms))


async def _all_ready(llms: list[AsyncLLM], engines: Sequence[EngineConfig]) -> None:
    """Wait until the engine of `llms` is ready; start the others and add them, one after the other.

    Raises:
        QuireError: one of them could not be built.
    """
    for number, config in enumerate(engines):
        try:
            if number:
                llms.append(_started(config))
            await llms[number].wait_until_ready()
        except QuireError as error:
            if len(engines) > 1:
                error.args = (f"{config.model}: {error}",)
            raise


async def start_state(app: Starlette) -> None:
    """Resume the batches that a previous server left unfinished.

    Raises:
        ApiError, OSError: they cannot be read.
    """
    if app.state.batches is not None:
        await app.state.batches.start(app)


async def close_state(app: Starlette) -> None:
    """Store responses still being generated, and close the stores."""
    if app.state.batches is not None:
        await app.state.batches.close()
    await app.state.context.close()


def spare_full_collections() -> None:
    """Make full garbage collections, which block the process, rarer and smaller.

    Existing objects are skipped, as they stay alive. 4,000 connections have 160,000 more: 100 ms.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


@contextlib.asynccontextmanager
async def _monitored(contexts: Sequence[ServerContext], bound: socket.socket | None) -> AsyncIterator[None]:
    """Answer on the monitoring port, if there is one, while the context lasts."""
    if bound is None:
        yield
        return
    from quire.server.monitoring.engine_probes import health_of, latest_exposition, stats_kept_current
    from quire.server.monitoring.probes import MonitoredServer

    server = MonitoredServer(lambda: health_of(contexts), lambda: latest_exposition(contexts))
    async with stats_kept_current(contexts), server.answering(bound):
        yield


async def _serve_engines(app: Starlette, listening: Listener, stop: StopSignals) -> None:
    """Serve until a signal stops the server, or engines of a model keep crashing."""
    from quire.server.http.server import HttpServer

    context: ServerContext = app.state.context
    contexts = context.contexts
    server = HttpServer(app, context.config.connections, listening.tls, app.state.access_log)
    async with (
        server.serving(listening.socket),
        cancelled_at_end(watch_key_file(context.tenants, stop.hangup)),
    ):
        _announce(contexts, listening)
        stopping = asyncio.create_task(_stop_gracefully(contexts, stop))
        crashing = [asyncio.create_task(each.llm.wait_for_crash_loop()) for each in contexts]
        done, _ = await asyncio.wait({stopping, *crashing}, return_when=asyncio.FIRST_COMPLETED)
        if stopping not in done:
            await drain([each for each in contexts if each.llm.failure is None], stop.immediate)
        if stop.immediate.is_set():
            server.hasten_end()
    for task in (stopping, *crashing):
        task.cancel()
    await asyncio.gather(stopping, *crashing, return_exceptions=True)
    for each, task in zip(contexts, crashing, strict=True):
        if not task.cancelled():
            raise CrashLoopError(each.named(str(task.result())))


async def watch_key_file(tenants: Tenants, hangup: asyncio.Event) -> None:
    """Reload the key file, if there is one, when it changes and when `hangup` is set."""
    if tenants.are_separate:
        await tenants.watch(hangup)


async def _stop_gracefully(contexts: Sequence[ServerContext], stop: StopSignals) -> None:
    await stop.graceful.wait()
    await drain(contexts, stop.immediate)


async def drain(contexts: Sequence[ServerContext], immediate: asyncio.Event) -> None:
    """Refuse new requests, wait for running ones until `drain_timeout` or `immediate`, abort the rest."""
    for context in contexts:
        context.calls.begin_drain()
    num_running = sum(len(context.calls.request_ids) for context in contexts)
    if num_running:
        announce_stop(num_running, contexts[0].config.drain_timeout)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(contexts[0].config.drain_timeout if contexts else 0):
            for context in contexts:
                await finished_unless_set(immediate, context.calls.wait_idle())
    for context in contexts:
        for request_id in context.calls.request_ids:
            context.llm.abort(request_id)


def _announce(contexts: Sequence[ServerContext], listening: Listener) -> None:
    """Print that the server is ready, its URL, what it serves, and a command to try with the first model."""
    context = contexts[0]
    info = context.llm.info
    sent_key = ' -H "Authorization: Bearer ${QUIRE_API_KEY%% *}"'  # of several keys, the first
    key = sent_key if context.tenants.needs_key else ""
    hint = "Try, with QUIRE_API_KEY set to the key" if key and not os.environ.get("QUIRE_API_KEY") else "Try"
    path, fields = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if info.pooling is not None:
        path, fields = "embeddings", '"input": "Hello"'
    question = f'{{"model": "{context.model_name}", {fields}}}'
    url = f"{listening.curl}/v1/{path}"
    loaded = "; ".join(
        f"{each.model_name}, {each.llm.info.dtype} on {each.llm.info.device}, "
        f"loaded in {each.llm.info.load_seconds:.1f} s"
        for each in contexts
    )
    print(
        f"Ready: {listening.url} ({loaded})\n"
        f"{hint}: curl {url}{key} -H 'Content-Type: application/json' -d '{question}'",
        flush=True,
    )
