"""`quire route`: several engines as one server."""

from __future__ import annotations

from quire.cli.options import config_options
from quire.config import RouterConfig
from quire.errors import QuireError


@config_options(router=RouterConfig)
def route(router: RouterConfig) -> None:
    """Make several engines look like one OpenAI server.

    A long prompt is computed by a --prefill engine and continued by a --decode engine; an --engine does
    both. Each request goes to the engine that will be done with it first, where it counts what an engine
    has cached of the prompt. An engine that fails gets no requests until it answers again. Engines can be
    added, drained and removed at run time, at /route/engines. Ctrl-C or SIGTERM lets running requests
    finish (see --drain-timeout); a second one stops immediately.

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
