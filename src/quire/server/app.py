"""The application: routes, and errors as answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from quire import __version__
from quire.config import ServerConfig
from quire.errors import nearest_name
from quire.server.anthropic.call import MESSAGE_ENDPOINTS
from quire.server.batches.directory import BatchDirectory, opened_directory
from quire.server.batches.handlers import BATCH_ENDPOINTS
from quire.server.batches.service import Batches
from quire.server.context import ServerContext, SharedState
from quire.server.control.administration import ADMINISTRATION_ENDPOINTS
from quire.server.control.live_requests import REQUEST_ENDPOINTS
from quire.server.control.page_files import page_files, page_routes
from quire.server.dispatch import answer_of
from quire.server.edge.browsers import CallerCheck, CallerRules, cors_options
from quire.server.edge.middleware import HttpMetrics, KeyCheck, RequestEnvelope, RootPath
from quire.server.monitoring.endpoints import MONITORING_ENDPOINTS
from quire.server.ollama.call import OLLAMA_ENDPOINTS
from quire.server.openai.endpoints import COMPLETION_ENDPOINTS, EMBEDDING_ENDPOINTS, MODEL_ENDPOINTS
from quire.server.responses.handlers import RESPONSE_ENDPOINTS
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.scores.endpoints import SCORE_ENDPOINTS
from quire.server.tenancy.tenants import Tenants
from quire.server.tokens.endpoints import TOKEN_ENDPOINTS
from quire.server.wire.access_log import AccessLog, AccessLogging
from quire.server.wire.answers import encode
from quire.server.wire.errors import OPENAI_ERRORS, ApiError, as_api_error, error_shape_of
from quire.server.wire.openapi import docs_page, openapi_document
from quire.server.wire.paths import MONITORING_PATHS, CanonicalPath

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM
    from quire.server.metrics.tracing import Tracing


def create_app(
    llm: AsyncLLM,
    config: ServerConfig,
    tenants: Tenants | None = None,
    log: AccessLog | None = None,
    sampling_defaults: SamplingDefaults | None = None,
    *,
    tracing: Tracing | None = None,
    batch_directory: BatchDirectory | None = None,
    others: Sequence[tuple[AsyncLLM, ServerConfig, SamplingDefaults]] = (),
) -> Starlette:
    """Return the application that serves `llm`, which must be ready; the caller shuts it down.

    The state is at `app.state.context` (the first model's `ServerContext`), the batches are at
    `app.state.batches`, the log is at `app.state.access_log`. `serve.start_state` comes before the first
    request, `serve.close_state` after the last one.

    Args:
        llm: the engine's front door.
        config: the server's configuration.
        tenants: the tenants that `config` names; None: they are read here.
        log: access log; None: none.
        sampling_defaults: the defaults that `config` names; None: they are read here.
        tracing: traces calls; None: they are not traced.
        batch_directory: the directory that `config` names; None: it is opened here.
        others: more models, ready, each with its configuration and defaults.

    Raises:
        ConfigError: the key file or the defaults of sampling cannot be read, or are invalid; or the directory
            of batches cannot be used.
    """
    directory = batch_directory or opened_directory(config)
    batches = None if directory is None else Batches(directory, config.batches)
    shared = SharedState(config, tenants, tracing)
    context = ServerContext(llm, config, shared, sampling_defaults)
    for other, own_config, own_defaults in others:
        ServerContext(other, own_config, shared, own_defaults)
    openapi, docs = api_documents(config.root_path)
    page = page_files(needs_key=context.tenants.needs_key) if config.page else {}
    routes = [
        *(
            Route(one.route_path, functools.partial(answer_of, one), methods=[one.method])
            for one in ENDPOINTS
        ),
        _constant("/openapi.json", Response(openapi, media_type="application/json")),
        _constant("/docs", HTMLResponse(docs)),
        *page_routes(page),
    ]
    app = Starlette(
        routes=routes,
        middleware=_middleware(context, routes, log, MONITORING_PATHS.union(page)),
        exception_handlers={HTTPException: _answer_unrouted},
    )
    app.router.redirect_slashes = False
    app.state.context, app.state.batches = context, batches
    app.state.access_log = log
    return app


@functools.cache
def api_documents(root_path: str) -> tuple[bytes, str]:
    """Return the contents of /openapi.json and /docs, which take a tenth of a second to make."""
    document = openapi_document(ENDPOINTS, __version__, root_path)
    return encode(document), docs_page(document)


def _middleware(
    context: ServerContext, routes: Sequence[Route], log: AccessLog | None, open_paths: frozenset[str]
) -> list[Middleware]:
    """Return the middleware, outermost first; `open_paths` need no key."""
    config = context.config
    edge = config.edge
    return [
        *([] if log is None else [Middleware(AccessLogging, log=log)]),
        *([Middleware(RootPath, prefix=config.root_path)] if config.root_path else []),
        Middleware(CanonicalPath),
        Middleware(HttpMetrics, requests=context.metrics.http_requests, routes=routes),
        Middleware(RequestEnvelope, shapes=_ERROR_SHAPES),
        Middleware(CallerCheck, rules=CallerRules(edge, config.host)),
        *([Middleware(CORSMiddleware, **cors_options(edge))] if edge.cors_origins else []),
        Middleware(KeyCheck, tenants=context.tenants, open_paths=open_paths),
    ]


def _constant(path: str, response: Response) -> Route:
    async def answer(request: Request) -> Response:
        return response

    return Route(path, answer, methods=["GET"])


async def _answer_unrouted(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods with 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        nearest = nearest_name(path, [*(endpoint.path for endpoint in ENDPOINTS), "/docs", "/openapi.json"])
        answer = ApiError(404, f"there is no {path!r}; {nearest}", code="route_not_found")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {path}; use {allowed}"
        answer = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    else:
        answer = as_api_error(error)
    return answer.response(error_shape_of(request.scope))


ENDPOINTS = (
    *COMPLETION_ENDPOINTS,
    *EMBEDDING_ENDPOINTS,
    *SCORE_ENDPOINTS,
    *RESPONSE_ENDPOINTS,
    *MESSAGE_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *TOKEN_ENDPOINTS,
    *MODEL_ENDPOINTS,
    *REQUEST_ENDPOINTS,
    *ADMINISTRATION_ENDPOINTS,
    *MONITORING_ENDPOINTS,
)

_ERROR_SHAPES = tuple({endpoint.error_shape for endpoint in ENDPOINTS} - {OPENAI_ERRORS})
