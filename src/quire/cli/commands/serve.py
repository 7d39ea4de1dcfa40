"""`quire serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

from quire.cli.options import config_options
from quire.config import EngineConfig, ServerConfig


@config_options(
    positional=("model",), defaults={"spare_engine": True}, engine=EngineConfig, server=ServerConfig
)
def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve MODEL over HTTP, in OpenAI's API.

    Serves /v1/chat/completions, /v1/completions, /v1/responses and Anthropic's /v1/messages, streaming or
    not, /metrics for Prometheus, and /docs, which lists all there is. Ctrl-C or SIGTERM lets running
    requests finish (see --drain-timeout); a second one stops immediately.

    Examples:
      quire serve
      quire serve Qwen/Qwen3-0.6B --port 9000 --cache-size 4
      quire serve --config server.yaml
      quire serve ./my-model --api-key "$KEY" --policy priority
    """
    from quire.server.serve import serve as run_server

    run_server(engine, server)
