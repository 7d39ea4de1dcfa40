"""Answering a request to an endpoint, including all errors."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import context_of, request_id_of
from quire.server.wire.access_log import CLIENT_LEFT, note_error
from quire.server.wire.errors import ClientGoneError, as_api_error, error_shape_of
from quire.server.wire.leniency import HEADER, Leniency
from quire.server.wire.openapi import Endpoint
from quire.server.wire.validation import read_body


async def answer_of(endpoint: Endpoint, request: Request) -> Response:
    """Return the answer of the endpoint's handler, or an error answer if it raises."""
    try:
        if endpoint.body is None and endpoint.form is None:
            return await endpoint.handler(request)
        return await _answer_to_body(request, endpoint)
    except ClientGoneError:
        note_error(request.scope, "client_left")
        return Response(status_code=CLIENT_LEFT)
    except Exception as error:  # as_api_error logs what it does not know
        return as_api_error(error, request_id=request_id_of(request)).response(error_shape_of(request.scope))


async def _answer_to_body(request: Request, endpoint: Endpoint) -> Response:
    """Return the handler's answer with a header about ignored fields; handlers read forms themselves."""
    context = context_of(request)
    leniency = Leniency(is_strict=context.config.strict)
    request.scope["state"]["leniency"] = leniency
    if endpoint.body is None:
        response = await endpoint.handler(request)
    else:
        body = await read_body(
            request,
            endpoint.body,
            max_body_bytes=context.config.max_body_bytes,
            max_prompt_tokens=max(one.llm.info.max_model_len for one in context.contexts),
            leniency=leniency,
            takes_any_type=endpoint.takes_any_type,
        )
        response = await endpoint.handler(request, body)
    if leniency.ignored:
        response.headers[HEADER] = leniency.header()
        context.ignored_names.note(leniency.ignored)
    return response
