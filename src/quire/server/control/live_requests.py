"""/v1/requests: listing, explaining and aborting live requests; and releasing KV held for peers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.kv.peers.transfer_params import TransferId
from quire.server.context import ENGINE_TIMEOUT, ServerContext, context_of, contexts_of, tenant_of
from quire.server.tenancy.tenants import Tenant
from quire.server.wire.answers import AbortedCall, ReleasedKV, ServedCall, ServedCallList, json_response
from quire.server.wire.errors import TIMEOUT, ApiError
from quire.server.wire.openapi import Endpoint

MAX_LISTED = 100

MAX_SENTENCES = 200
"""Maximum sentences per answer, divided among calls; with a long queue, each takes a millisecond."""


async def list_requests(request: Request) -> Response:
    """List the tenant's visible requests, oldest first, with what each is doing or waiting for."""
    tenant, has_more = tenant_of(request), False
    data: list[ServedCall] = []
    for context in context_of(request).contexts:
        own = filter(tenant.sees, context.calls.by_id)
        engine_ids = list(itertools.islice(own, MAX_LISTED - len(data)))
        has_more = has_more or next(own, None) is not None
        data += await _explained(context, tenant, engine_ids)
    return json_response(ServedCallList(data=data, has_more=has_more))


async def get_request(request: Request) -> Response:
    """Explain what a request is doing or waiting for, by the id in its answer."""
    context, call_id = _live_call(request)
    [call] = await _explained(context, tenant_of(request), [call_id])
    return json_response(call)


async def abort_request(request: Request) -> Response:
    """Abort a live request; its client gets an error with the code aborted."""
    context, call_id = _live_call(request)
    context.calls.note_abort(call_id)
    for request_id in context.calls.by_id[call_id]:
        context.llm.abort(request_id)
    return json_response(AbortedCall(id=tenant_of(request).call_id(call_id)))


def _live_call(request: Request) -> tuple[ServerContext, str]:
    """Return the call named in the path: its model's context, and its id (`Tenant.engine_id`).

    Raises:
        ApiError: 404: no such call, visible to the tenant, is being served.
    """
    tenant = tenant_of(request)
    request_id: str = request.path_params["request_id"]
    candidates = [tenant.engine_id(request_id)] + [request_id] * tenant.sees_all
    for engine_id, context in itertools.product(candidates, contexts_of(request)):
        if engine_id in context.calls.by_id:
            return context, engine_id
    raise ApiError(
        404,
        f"the request {request_id!r} is not being served: it has ended or never arrived; /v1/requests "
        "lists those that are",
        code="request_not_found",
    )


async def _explained(context: ServerContext, tenant: Tenant, engine_ids: Sequence[str]) -> list[ServedCall]:
    """Return what these live calls are doing or waiting for, with ids as `tenant` knows them."""
    groups = [context.calls.by_id[engine_id] for engine_id in engine_ids]
    limit = MAX_SENTENCES // max(1, len(groups))
    try:
        states = await asyncio.wait_for(context.llm.explain_all(groups, limit), ENGINE_TIMEOUT)
    except TimeoutError:
        raise ApiError(
            504,
            f"the engine has not explained its requests within {ENGINE_TIMEOUT:g} s: its steps take long, "
            "or it hangs (see /health); try again",
            kind=TIMEOUT,
            code="engine_timeout",
        ) from None
    return [
        ServedCall(id=tenant.call_id(engine_id), state=state)
        for engine_id, state in zip(engine_ids, states, strict=True)
    ]


async def release_kv(request: Request) -> Response:
    """Free the KV held under a transfer id, now or when it arrives; has no effect if it is gone."""
    tenant_of(request).require_kv_transfer("/v1/kv_transfers")
    try:
        transfer_id: str = msgspec.convert(request.path_params["transfer_id"], TransferId)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the transfer_id is invalid: {error}") from error
    engines = [context.llm for context in context_of(request).contexts]
    lenders = [llm for llm in engines if llm.info.kv_transfer_address is not None]
    if not lenders:
        raise ApiError(
            404, "this engine lends no KV; start it with --role prefill", code="kv_transfer_not_found"
        )
    for llm in lenders:  # an unknown id has no effect
        llm.release_kv(transfer_id)
    return json_response(ReleasedKV(id=transfer_id))


_NO_ENGINE = {503: "The engine is not available."}
_NO_EXPLANATION = {**_NO_ENGINE, 504: "The engine has not answered in time."}

REQUEST_ENDPOINTS = (
    Endpoint("GET", "/v1/requests", list_requests, ServedCallList, errors=_NO_EXPLANATION),
    Endpoint(
        "GET",
        "/v1/requests/{request_id}",
        get_request,
        ServedCall,
        errors={404: "No such request is being served.", **_NO_EXPLANATION},
    ),
    Endpoint(
        "DELETE",
        "/v1/requests/{request_id}",
        abort_request,
        AbortedCall,
        errors={404: "No such request is being served.", **_NO_ENGINE},
    ),
    Endpoint(
        "DELETE",
        "/v1/kv_transfers/{transfer_id}",
        release_kv,
        ReleasedKV,
        errors={
            400: "The id is invalid.",
            403: "The tenant may not.",
            404: "The engine lends no KV.",
            **_NO_ENGINE,
        },
    ),
)
