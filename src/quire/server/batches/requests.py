"""Answering a request of a batch like one over HTTP, without a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.errors import InvalidRequestError
from quire.request_options import LOWEST_PRIORITY
from quire.server.context import context_of
from quire.server.dispatch import answer_of
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.openai.chat import create_chat_completion
from quire.server.openai.completions import create_completion
from quire.server.openai.embeddings import EmbeddingRequest, create_embeddings
from quire.server.responses.body import ResponsesRequest
from quire.server.responses.handlers import create_response
from quire.server.tenancy.tenants import Tenant
from quire.server.wire.access_log import AccessLog, AccessRecord
from quire.server.wire.openapi import Endpoint


def _in_batch(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Wrap a handler: bodies must not stream, and get the lowest priority."""

    async def answer(request: Request, body: Any) -> Response:
        for name in ("stream", "background"):
            if getattr(body, name, None):
                raise InvalidRequestError(
                    f"{name} is true; requests of a batch are answered whole", param=name
                )
        if context_of(request).of_model(body.model).llm.info.reads_priority:
            body.priority = LOWEST_PRIORITY
        return await handler(request, body)

    return answer


def _endpoint(path: str, handler: Callable[..., Awaitable[Response]], body: type[BaseModel]) -> Endpoint:
    return Endpoint("POST", path, _in_batch(handler), None, body=body)


_ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        _endpoint("/v1/completions", create_completion, CompletionRequest),
        _endpoint("/v1/chat/completions", create_chat_completion, ChatCompletionRequest),
        _endpoint("/v1/embeddings", create_embeddings, EmbeddingRequest),
        _endpoint("/v1/responses", create_response, ResponsesRequest),
    )
}


async def answer_line(app: Starlette, tenant: Tenant, url: str, request_id: str, body: bytes) -> Response:
    """Return the answer to a request of a batch, or its error.

    Args:
        app: the server's application.
        tenant: the request's tenant.
        url: path of the endpoint.
        request_id: id of the request.
        body: the request's body, JSON.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # this client never disconnects
        return messages.pop()

    scope = {
        "type": "http",
        "app": app,
        "method": "POST",
        "path": url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {"request_id": request_id, "tenant": tenant},
    }
    record = AccessRecord(client="batch", method="POST", path=url)
    if app.state.context.tenants.needs_key:
        record.tenant = tenant.name
    log: AccessLog | None = app.state.access_log
    with contextlib.nullcontext() if log is None else log.noting(scope, record):
        answer = await answer_of(_ENDPOINTS[url], Request(scope, receive))
        record.status = answer.status_code
        await answer(scope, receive, _send_nowhere)  # logs errors when they are sent
    return answer


async def _send_nowhere(_message: Message) -> None:
    pass
