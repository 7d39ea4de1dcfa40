"""GET /v1/requests: what the requests that are being served do or wait for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import EngineDeadError
from quire.server.context import ENGINE_TIMEOUT, ServerContext, context_of
from quire.server.errors import ApiError
from quire.server.responses import ServedCall, ServedCallList, json_response

MAX_LISTED = 100


async def list_requests(request: Request) -> Response:
    """List the requests that are being served, the oldest first, with what each does or waits for."""
    context = context_of(request)
    calls = context.calls.by_id
    call_ids = list(itertools.islice(calls, MAX_LISTED))
    data = await _explained(context, call_ids)
    return json_response(ServedCallList(data=data, has_more=len(calls) > len(call_ids)))


async def get_request(request: Request) -> Response:
    """Explain what a request does or waits for, by the id that its answer carries."""
    context = context_of(request)
    request_id = request.path_params["request_id"]
    if request_id not in context.calls.by_id:
        raise ApiError(
            404,
            f"the request {request_id!r} is not being served: it has ended or never arrived; /v1/requests "
            "lists those that are",
            code="request_not_found",
        )
    [call] = await _explained(context, [request_id])
    return json_response(call)


async def _explained(context: ServerContext, call_ids: Sequence[str]) -> list[ServedCall]:
    """Return what these calls, which are being served, do or wait for."""
    groups = [context.calls.by_id[call_id] for call_id in call_ids]
    request_ids = list(itertools.chain.from_iterable(groups))
    try:
        sentences = iter(await asyncio.wait_for(context.llm.explain_all(request_ids), ENGINE_TIMEOUT))
    except TimeoutError:
        raise EngineDeadError(f"the engine has not answered for {ENGINE_TIMEOUT:g} s") from None
    return [
        ServedCall(id=call_id, state=[text for _ in group for text in next(sentences)])
        for call_id, group in zip(call_ids, groups, strict=True)
    ]
