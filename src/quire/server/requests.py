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
from quire.server.responses import RequestList, RequestState, encode

MAX_LISTED = 100


async def list_requests(request: Request) -> Response:
    """List the calls that are being served, the oldest first, at most `MAX_LISTED` of them."""
    context = context_of(request)
    calls = context.lifecycle.live_calls
    call_ids = list(itertools.islice(calls, MAX_LISTED))
    states = await _states(context, call_ids)
    requests = RequestList(data=states, has_more=len(calls) > len(call_ids))
    return Response(encode(requests), media_type="application/json")


async def get_request(request: Request) -> Response:
    """Describe one call that is being served, by the id that its answer carries."""
    context = context_of(request)
    call_id = request.path_params["request_id"]
    if call_id not in context.lifecycle.live_calls:
        raise ApiError(
            404,
            f"the request {call_id!r} is not being served: it has ended, or never came; /v1/requests lists "
            "those that are",
            code="request_not_found",
        )
    [state] = await _states(context, [call_id])
    return Response(encode(state), media_type="application/json")


async def _states(context: ServerContext, call_ids: Sequence[str]) -> list[RequestState]:
    """Return what these calls, which are being served, do or wait for."""
    groups = [context.lifecycle.live_calls[call_id] for call_id in call_ids]
    request_ids = list(itertools.chain.from_iterable(groups))
    try:
        sentences = iter(await asyncio.wait_for(context.llm.explain_all(request_ids), ENGINE_TIMEOUT))
    except TimeoutError:
        raise EngineDeadError(f"the engine has not answered for {ENGINE_TIMEOUT:g} s") from None
    return [
        RequestState(id=call_id, state=[text for _ in group for text in next(sentences)])
        for call_id, group in zip(call_ids, groups, strict=True)
    ]
