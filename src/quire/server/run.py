"""`serve`: the engine and its HTTP front."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from quire.config import EngineConfig, ServerConfig
from quire.front.async_llm import AsyncLLM
from quire.server.listening import bound_socket

if TYPE_CHECKING:
    from quire.server.serving import OnProgress


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    loading: contextlib.AbstractContextManager[OnProgress | None] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish and return.

    A second signal stops at once. Call it from the main thread.

    Args:
        engine_config: of the engine.
        server_config: of the HTTP front.
        loading: entered while the model loads; what it gives is called with (bytes done, bytes in all).

    Raises:
        ConfigError: the address cannot be listened on, or the engine's configuration cannot work.
        ModelError: the model cannot be found or read.
        EngineDeadError: the engine did not start.
    """
    with contextlib.closing(bound_socket(server_config)) as bound:
        print(f"Loading {engine_config.model} ...", file=sys.stderr, flush=True)
        llm = AsyncLLM(engine_config)  # outside the event loop: Ctrl-C must be able to end a download

        from quire.server.serving import serve_until_stopped  # slow: meanwhile the engine process loads

        asyncio.run(serve_until_stopped(llm, server_config, bound, loading or contextlib.nullcontext()))
