"""`quire serve` and `quire route`: the OpenAI-compatible HTTP server, and several engines as one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.options import config_options, parameters_of
from quire.config import EngineConfig, RouterConfig, ServerConfig
from quire.config.server import OF_MODEL
from quire.errors import QuireError


@config_options(
    positional=("model",),
    defaults={"standby_engine": True},
    of_model=(*parameters_of(EngineConfig), *OF_MODEL),
    engine=EngineConfig,
    server=ServerConfig,
)
def serve(
    engine: EngineConfig, server: ServerConfig, others: Sequence[tuple[EngineConfig, ServerConfig]]
) -> None:
    """Serve MODEL over HTTP, in OpenAI's API.

    Serves /v1/chat/completions, /v1/completions, /v1/responses and Anthropic's /v1/messages, streaming or
    not, /metrics for Prometheus, and /docs, which lists all endpoints. Ctrl-C or SIGTERM lets running
    requests finish (see --drain-timeout); a second one stops immediately.

    Examples:
      quire serve
      quire serve Qwen/Qwen3-0.6B --port 9000 --cache-size 4
      quire serve Qwen/Qwen3-0.6B --model BAAI/bge-small-en-v1.5
      quire serve --config server.yaml
      quire serve ./my-model --api-key "$KEY" --policy priority
    """
    from quire.server.serve import serve as run_server

    run_server(engine, server, others)


@config_options(router=RouterConfig)
def route(router: RouterConfig) -> None:
    """Make several engines look like one OpenAI server.

    A long prompt is computed by a --prefill engine and continued by a --decode engine; an --engine does
    both. Each request goes to the engine that will finish it first, given its load and the cached part of
    the prompt. An engine that fails gets no requests until it answers again. Engines can be added, drained
    and removed at run time, at /route/engines. Ctrl-C or SIGTERM lets running requests finish (see
    --drain-timeout); a second one stops immediately.

    Examples:
      quire route --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000
      quire route --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --port 9000
    """
    try:
        from quire.cluster.route import route as run_router
    except ModuleNotFoundError as error:
        raise QuireError(
            f"quire route needs {error.name}, which is not installed; pip install 'quire[cluster]'"
        ) from error
    run_router(router)
