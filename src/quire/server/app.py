"""The FastAPI application: routes, and how errors become answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from quire.config import ServerConfig
from quire.errors import EngineDeadError
from quire.server.chat import create_chat_completion
from quire.server.completions import create_completion
from quire.server.context import ENGINE_TIMEOUT, ServerContext, context_of, no_such_route, request_id_of
from quire.server.errors import ApiError, ClientGoneError, as_api_error
from quire.server.middleware import RequestEnvelope
from quire.server.openapi import ENDPOINTS, openapi_document
from quire.server.requests import get_request, list_requests
from quire.server.responses import Health, ModelCard, ModelList, Version, encode

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM

Handler = Callable[[Request], Awaitable[Response]]

_CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; nobody reads it


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """Return the application that serves `llm`, which must be ready; the caller shuts it down.

    The server's state is at `app.state.context` (`ServerContext`).
    """
    app = FastAPI(title="Quire", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.context = context = ServerContext(llm, config)
    handlers: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/completions"): create_completion,
        ("POST", "/v1/chat/completions"): create_chat_completion,
        ("GET", "/v1/models"): list_models,
        ("GET", "/v1/models/{model}"): get_model,
        ("GET", "/v1/requests"): list_requests,
        ("GET", "/v1/requests/{request_id}"): get_request,
        ("GET", "/health"): health,
        ("GET", "/metrics"): metrics,
        ("GET", "/version"): version,
    }
    for endpoint in ENDPOINTS:
        handler = handlers[endpoint.method, endpoint.path]
        app.add_api_route(endpoint.route_path, _answering_errors(handler), methods=[endpoint.method])
    document = encode(openapi_document(context.version))

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    app.add_api_route("/openapi.json", openapi, methods=["GET"])
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(RequestEnvelope, api_key=config.api_key)
    return app


def _answering_errors(handler: Handler) -> Handler:
    """Return `handler` with everything it raises turned into an OpenAI-shaped answer."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as error:  # as_api_error logs what it does not know
            return as_api_error(error, request_id=request_id_of(request)).response()

    answer.__doc__ = handler.__doc__
    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return no_such_route(path, [endpoint.path for endpoint in ENDPOINTS]).response()
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not possible on {path}; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
    return as_api_error(error).response()


def _json(payload: object, status: int = 200) -> Response:
    return Response(encode(payload), status, media_type="application/json")


def _model_card(context: ServerContext) -> ModelCard:
    return ModelCard(
        id=context.model_name,
        created=context.started_at,
        owned_by="quire",
        max_model_len=context.llm.info.max_model_len,
    )


async def list_models(request: Request) -> Response:
    """List the served model."""
    return _json(ModelList(data=[_model_card(context_of(request))]))


async def get_model(request: Request) -> Response:
    """Describe the served model."""
    context = context_of(request)
    context.require_model(request.path_params["model"])
    return _json(_model_card(context))


async def health(request: Request) -> Response:
    """Tell whether requests can be served: 200, or 503 with the reason."""
    context = context_of(request)
    if context.lifecycle.draining:
        return _json(Health(status="draining", reason="the server is shutting down"), 503)
    try:
        context.llm.check_health()
    except EngineDeadError as error:
        return _json(Health(status="unavailable", reason=str(error)), 503)
    return _json(Health(status="ok"))


async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format."""
    context = context_of(request)
    stats = None
    try:
        context.llm.check_health()
        stats = await asyncio.wait_for(context.llm.stats(), ENGINE_TIMEOUT)
        engine_up = True
    except (EngineDeadError, TimeoutError):
        engine_up = False
    context.metrics.engine.update(stats, engine_up=engine_up)
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    """Return Quire's version."""
    return _json(Version(version=context_of(request).version))
