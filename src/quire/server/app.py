"""The application: its routes, and how errors become answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import quire
from quire.config import ServerConfig
from quire.errors import nearest_name
from quire.server.anthropic.answers import ErrorAnswer, MessageAnswer, TokenCount
from quire.server.anthropic.body import CountTokensRequest, MessagesRequest
from quire.server.anthropic.call import count_message_tokens, create_message
from quire.server.batches.directory import BatchDirectory, opened_directory
from quire.server.batches.endpoints import BATCH_ENDPOINTS
from quire.server.batches.service import Batches
from quire.server.context import ServerContext, context_of
from quire.server.control.administration import (
    is_paused,
    is_sleeping,
    pause,
    reset_prefix_cache,
    resume,
    sleep,
    wake_up,
)
from quire.server.control.kv_release import release_kv
from quire.server.control.live_requests import abort_request, get_request, list_requests
from quire.server.control.page_files import page_files, page_routes
from quire.server.control.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from quire.server.dispatch import answer_of
from quire.server.edge.browsers import CallerCheck, CallerRules, cors_options
from quire.server.edge.middleware import KeyCheck, RequestEnvelope
from quire.server.edge.root_path import RootPath
from quire.server.metrics.http import HttpMetrics
from quire.server.monitoring.engine_probes import current_stats, health_of
from quire.server.monitoring.stats import Stats, get_stats
from quire.server.ollama.endpoints import OLLAMA_ENDPOINTS
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.completions import create_completion
from quire.server.responses.answers import DeletedResponse, InputItemList, ResponseAnswer
from quire.server.responses.body import ResponsesRequest
from quire.server.responses.handlers import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.tenancy.tenants import Tenants
from quire.server.wire.access_log import AccessLog, AccessLogging
from quire.server.wire.answers import (
    AbortedCall,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizedText,
    EngineDescription,
    Health,
    KVEventSource,
    KVTransferAddress,
    ModelCard,
    ModelList,
    PauseStatus,
    ReleasedKV,
    ResetPrefixCache,
    ServedCall,
    ServedCallList,
    SleepStatus,
    TokenizerInfo,
    Tokens,
    Version,
    encode,
    json_response,
)
from quire.server.wire.docs_page import docs_page
from quire.server.wire.error_shapes import error_shape_of
from quire.server.wire.errors import ApiError, as_api_error
from quire.server.wire.openapi import (
    GENERATION_ERRORS,
    PROMPT_ERRORS,
    TOKENIZATION_ERRORS,
    Endpoint,
    openapi_document,
)
from quire.server.wire.paths import MONITORING_PATHS, READINESS_PATHS, CanonicalPath

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
) -> Starlette:
    """Return the application that serves `llm`, which must be ready; the caller shuts it down.

    The server's state is at `app.state.context` (`ServerContext`), the log at `app.state.access_log`. The
    state is to be started before the first request, and closed after the last one.

    Args:
        llm: the engine's front door.
        config: the server's configuration.
        tenants: that `config` names; None: they are read here.
        log: where each request is logged; None: nowhere.
        sampling_defaults: that `config` names; None: they are read here.
        tracing: traces calls; None: they are not traced.
        batch_directory: that `config` names; None: it is opened here.

    Raises:
        ConfigError: the key file or the defaults of sampling cannot be read, or are invalid; or the directory
            of batches cannot be used.
    """
    directory = batch_directory or opened_directory(config)
    batches = None if directory is None else Batches(directory, config.batches)
    context = ServerContext(llm, config, tenants, sampling_defaults, tracing=tracing, batches=batches)
    openapi, docs = api_documents(config.root_path)
    page = page_files(needs_key=context.tenants.needs_key) if config.page else {}
    routes = [
        *(Route(one.route_path, _answering(one), methods=[one.method]) for one in ENDPOINTS),
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
    app.state.context = context
    app.state.access_log = log
    return app


@functools.cache
def api_documents(root_path: str) -> tuple[bytes, str]:
    """Return what is at /openapi.json and at /docs. Making them takes a tenth of a second, once."""
    document = openapi_document(ENDPOINTS, quire.__version__, root_path)
    return encode(document), docs_page(document)


def _middleware(
    context: ServerContext, routes: Sequence[Route], log: AccessLog | None, open_paths: frozenset[str]
) -> list[Middleware]:
    """Return what surrounds the routes, the outermost first; `open_paths` need no key."""
    config = context.config
    edge = config.edge
    return [
        *([] if log is None else [Middleware(AccessLogging, log=log)]),
        *([Middleware(RootPath, prefix=config.root_path)] if config.root_path else []),
        Middleware(CanonicalPath),
        Middleware(HttpMetrics, requests=context.metrics.http_requests, routes=routes),
        Middleware(RequestEnvelope),
        Middleware(CallerCheck, rules=CallerRules(edge, config.host)),
        *([Middleware(CORSMiddleware, **cors_options(edge))] if edge.cors_origins else []),
        Middleware(KeyCheck, tenants=context.tenants, open_paths=open_paths),
    ]


def _answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint's handler, with everything it raises as an answer."""

    async def answer(request: Request) -> Response:
        return await answer_of(endpoint, request)

    return answer


def _constant(path: str, response: Response) -> Route:
    async def answer(request: Request) -> Response:
        return response

    return Route(path, answer, methods=["GET"])


async def _answer_unrouted(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: an unknown path, or a method that a path does not have."""
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
    return answer.response(error_shape_of(path))


def _model_card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.started_at,
        owned_by="quire",
        max_model_len=context.llm.info.max_model_len,
    )


async def list_models(request: Request) -> Response:
    """List the served model, once under each of its names."""
    context = context_of(request)
    return json_response(ModelList(data=[_model_card(context, name) for name in context.model_names]))


async def get_model(request: Request) -> Response:
    """Describe the served model."""
    context = context_of(request)
    name = request.path_params["model"]
    context.require_model(name)
    return json_response(_model_card(context, name))


async def health(request: Request) -> Response:
    """Tell whether requests can be served: 200, or 503 with the reason."""
    health = health_of(context_of(request))
    return json_response(health, 200 if health.status == "ok" else 503)


async def live(request: Request) -> Response:
    """Tell that the server is alive, whatever the engine does."""
    return json_response(Health(status="ok"))


async def metrics(request: Request) -> Response:
    """Return the metrics in the Prometheus text format, and to an admin those of each tenant."""
    context = context_of(request)
    sender = context.tenants.of_headers(request.headers)
    stats, engine_up = await current_stats(context)
    context.metrics.engine.update(stats, context.llm.recovery_stats, engine_up=engine_up)
    exposition = context.metrics.exposition(of_tenants=sender is not None and sender.sees_all)
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


async def engine(request: Request) -> Response:
    """Describe the engine, as a router needs to know it."""
    context = context_of(request)
    info = context.llm.info
    address, ports = info.kv_transfer_address, info.kv_events_ports
    return json_response(
        EngineDescription(
            role=info.role,
            model=context.model_name,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            kv_transfer=None if address is None else KVTransferAddress(host=address[0], port=address[1]),
            kv_events=None if ports is None else _kv_event_source(context, *ports),
        )
    )


def _kv_event_source(context: ServerContext, port: int, replay_port: int) -> KVEventSource:
    return KVEventSource(port=port, replay_port=replay_port, tokenizer=context.llm.tokenizer.fingerprint)


async def version(request: Request) -> Response:
    """Return Quire's version."""
    return json_response(Version(version=context_of(request).version))


_NO_RESPONSE = {
    404: "The response is not stored.",
    503: "The store of responses is not available.",
}
_NO_ENGINE = {503: "The engine is not available."}
_NO_EXPLANATION = {**_NO_ENGINE, 504: "The engine has not answered in time."}
_FOR_ADMINS = {400: "The query is invalid.", 403: "The tenant may not.", **_NO_ENGINE}

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=create_completion,
        body=CompletionRequest,
        answer=Completion,
        event=Completion,
        errors=GENERATION_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=create_chat_completion,
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=GENERATION_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        body=ResponsesRequest,
        answer=ResponseAnswer,
        event=ResponseAnswer,
        errors=GENERATION_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=cancel_response,
        answer=ResponseAnswer,
        errors={400: "The response is not generated in the background.", **_NO_RESPONSE},
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=list_input_items,
        answer=InputItemList,
        errors={400: "The limit is invalid.", **_NO_RESPONSE},
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=get_response,
        answer=ResponseAnswer,
        event=ResponseAnswer,
        errors={
            400: "starting_after is invalid.",
            409: "The response's events are not kept.",
            **_NO_RESPONSE,
        },
    ),
    Endpoint(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=delete_response,
        answer=DeletedResponse,
        errors=_NO_RESPONSE,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        body=MessagesRequest,
        answer=MessageAnswer,
        event=MessageAnswer,
        errors=GENERATION_ERRORS,
        error_answer=ErrorAnswer,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_message_tokens,
        body=CountTokensRequest,
        answer=TokenCount,
        errors=PROMPT_ERRORS,
        error_answer=ErrorAnswer,
    ),
    *OLLAMA_ENDPOINTS,
    *BATCH_ENDPOINTS,
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        body=TokenizeRequest,
        answer=Tokens,
        errors=TOKENIZATION_ERRORS,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        body=DetokenizeRequest,
        answer=DetokenizedText,
        errors=TOKENIZATION_ERRORS,
    ),
    Endpoint(method="GET", path="/tokenizer_info", handler=tokenizer_info, answer=TokenizerInfo),
    Endpoint(method="GET", path="/v1/models", handler=list_models, answer=ModelList),
    Endpoint(
        method="GET",
        path="/v1/models/{model}",
        handler=get_model,
        answer=ModelCard,
        errors={404: "The model is not served here."},
    ),
    Endpoint(
        method="GET",
        path="/v1/requests",
        handler=list_requests,
        answer=ServedCallList,
        errors=_NO_EXPLANATION,
    ),
    Endpoint(
        method="GET",
        path="/v1/requests/{request_id}",
        handler=get_request,
        answer=ServedCall,
        errors={404: "No such request is being served.", **_NO_EXPLANATION},
    ),
    Endpoint(
        method="DELETE",
        path="/v1/requests/{request_id}",
        handler=abort_request,
        answer=AbortedCall,
        errors={404: "No such request is being served.", **_NO_ENGINE},
    ),
    Endpoint(
        method="DELETE",
        path="/v1/kv_transfers/{transfer_id}",
        handler=release_kv,
        answer=ReleasedKV,
        errors={
            400: "The id is invalid.",
            403: "The tenant may not.",
            404: "The engine lends no KV.",
            **_NO_ENGINE,
        },
    ),
    Endpoint(
        method="POST",
        path="/reset_prefix_cache",
        handler=reset_prefix_cache,
        answer=ResetPrefixCache,
        errors={409: "KV blocks are in use.", **_FOR_ADMINS},
    ),
    *(
        Endpoint(method="POST", path=path, handler=handler, answer=answer, errors=_FOR_ADMINS)
        for path, handler, answer in (
            ("/pause", pause, PauseStatus),
            ("/resume", resume, PauseStatus),
            ("/sleep", sleep, SleepStatus),
            ("/wake_up", wake_up, SleepStatus),
        )
    ),
    Endpoint(method="GET", path="/is_paused", handler=is_paused, answer=PauseStatus),
    Endpoint(method="GET", path="/is_sleeping", handler=is_sleeping, answer=SleepStatus),
    *(
        Endpoint(
            method="GET",
            path=path,
            handler=health,
            answer=Health,
            errors={503: "The engine is not available, or the server is shutting down."},
            error_answer=Health,
        )
        for path in READINESS_PATHS
    ),
    Endpoint(method="GET", path="/live", handler=live, answer=Health),
    Endpoint(method="GET", path="/metrics", handler=metrics, answer=None),
    Endpoint(method="GET", path="/stats", handler=get_stats, answer=Stats),
    Endpoint(method="GET", path="/engine", handler=engine, answer=EngineDescription),
    Endpoint(method="GET", path="/version", handler=version, answer=Version),
)
