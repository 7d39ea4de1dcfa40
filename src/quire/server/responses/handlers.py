"""The routes below /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.server.context import ServerContext, context_of, request_id_of, tenant_of
from quire.server.responses.answers import (
    DeletedResponse,
    InputItemList,
    ResponseAnswer,
    ResponseError,
    named_event,
)
from quire.server.responses.body import ResponsesRequest
from quire.server.responses.call import ResponsesCall
from quire.server.responses.items import Item, ItemReference, Items
from quire.server.responses.keeping import Keeping
from quire.server.storage.background import EventLog, EventLogs, events_gone
from quire.server.storage.response_store import ResponseStore, StoredResponse, not_found
from quire.server.wire.answers import encode, json_response
from quire.server.wire.errors import ApiError, as_api_error
from quire.server.wire.leniency import Leniency
from quire.server.wire.openapi import GENERATION_ERRORS, Endpoint
from quire.server.wire.streaming import event_stream

MAX_LISTED = 100
DEFAULT_LISTED = 20
MAX_LOOKUPS = 128
"""Maximum number of responses whose items one request may refer to."""

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(Items)
_decode_answer = msgspec.json.Decoder(ResponseAnswer).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer with a response: whole, as events (`stream`), or later (`background`)."""
    context, tenant = context_of(request), tenant_of(request).name
    given = await _resolved(context, tenant, body.items)
    earlier: list[Item] = []
    if (previous := body.previous_response_id) is not None:
        store = _store_of(context, previous, "previous_response_id")
        if context.background.has(tenant, previous):
            raise ApiError(
                400,
                f"the response {previous!r} is still being generated; continue from it when it is completed",
                param="previous_response_id",
                code="response_in_progress",
            )
        for part in await store.conversation(tenant, previous, context.config.max_body_bytes):
            earlier += _parsed(part)
    keeping = None
    if context.responses is not None and body.store is not False:
        keeping = Keeping(context.responses, tenant, previous, encode(_with_ids(given)), len(given))
    call = ResponsesCall(request, body, [*earlier, *given], keeping)
    if not body.background:
        return await call.response()
    if keeping is None:
        raise InvalidRequestError(
            "a background response must be stored, but store is false or this server stores none "
            "(its response_store)",
            param="background",
        )
    context.background.require_room()
    queued = call.answer("queued", [])
    await keeping.keep(queued)
    if not body.stream:
        context.background.start(tenant, call.id, _generate(call, keeping, request_id_of(request)))
        return json_response(queued)
    log = context.event_logs.begin(tenant, call.id)
    context.event_logs.append(log, map(named_event, call.queued_events()))
    work = _generate_events(call, keeping, log, context.event_logs, request_id_of(request))
    context.background.start(tenant, call.id, work)
    return await _stream(request, log, -1)


async def get_response(request: Request) -> Response:
    """Return a stored response; with `stream`, its events after `starting_after`."""
    if request.query_params.get("stream") != "true":
        return json_response(await _current(request))
    number = _starting_after(request)
    answer = await _current(request)
    log = context_of(request).event_logs.get(tenant_of(request).name, answer.id)
    if log is None or not log.has_after(number):
        raise events_gone()
    return await _stream(request, log, number)


async def delete_response(request: Request) -> Response:
    """Delete a stored response; cancel it if it is being generated."""
    context, tenant = context_of(request), tenant_of(request).name
    response_id = request.path_params["response_id"]
    await context.background.cancel(tenant, response_id)
    context.event_logs.remove(tenant, response_id)
    if not await _store_of(context, response_id).delete(tenant, response_id):
        raise not_found(response_id)
    return json_response(DeletedResponse(id=response_id))


async def cancel_response(request: Request) -> Response:
    """Stop generating a response in the background."""
    answer = await _current(request)
    if not answer.background:
        raise ApiError(
            400,
            f"the response {answer.id!r} is not generated in the background; close its connection instead",
            code="not_a_background_response",
        )
    await context_of(request).background.cancel(tenant_of(request).name, answer.id)
    return json_response(await _current(request))


async def list_input_items(request: Request) -> Response:
    """List the input items of a stored response, the newest first unless `order` is asc."""
    limit = _limit_of(request)
    items = _decode_items((await _stored(request)).input)
    if request.query_params.get("order") != "asc":
        items.reverse()
    after = request.query_params.get("after")
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    page = items[start : start + limit]
    return json_response(
        InputItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=start + limit < len(items),
        )
    )


async def _generate(call: ResponsesCall, keeping: Keeping, request_id: str) -> None:
    """Generate a response in the background and store the result."""
    try:
        await call.whole_answer()
    except asyncio.CancelledError:
        await keeping.keep(call.answer("cancelled", []))
    except Exception as error:  # reported when the client gets the response
        answer = as_api_error(error, request_id=request_id)
        await keeping.keep(call.failed(answer))


async def _generate_events(
    call: ResponsesCall, keeping: Keeping, log: EventLog, logs: EventLogs, request_id: str
) -> None:
    """Like `_generate`, but also log the events of the response."""
    try:
        async with contextlib.aclosing(call.events()) as pieces:
            async for events in pieces:
                logs.append(log, map(named_event, events))
    except asyncio.CancelledError:
        await keeping.keep(call.answer("cancelled", []))
    except Exception as error:
        answer = as_api_error(error, request_id=request_id)
        await keeping.keep(call.failed(answer))
        logs.append(log, map(named_event, call.failure_events(answer)))
    finally:
        logs.end(keeping.tenant, call.id)


async def _stream(request: Request, log: EventLog, number: int) -> Response:
    """Stream a log's events after one; a client that disconnects does not end the response."""
    return await event_stream(
        request.receive, log.after(number), _stream_error, request_id=request_id_of(request)
    )


def _stream_error(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.body() + b"\n\n"


def _starting_after(request: Request) -> int:
    text = request.query_params.get("starting_after")
    if text is None:
        return -1
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequestError(
            f"starting_after is {text!r:.20}; it must be the sequence_number of an event",
            param="starting_after",
        )
    return int(text)


async def _current(request: Request) -> ResponseAnswer:
    """Return the stored response of a request, with its current status."""
    answer = _decode_answer((await _stored(request)).answer)
    if answer.status == "queued":
        if context_of(request).background.has(tenant_of(request).name, answer.id):
            answer.status = "in_progress"
        else:
            answer.status = "failed"
            answer.error = ResponseError("server_error", "the server has ended while generating it")
    return answer


async def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await _store_of(context_of(request), response_id).get(tenant_of(request).name, response_id)
    if stored is None:
        raise not_found(response_id)
    return stored


def _store_of(context: ServerContext, response_id: str, param: str | None = None) -> ResponseStore:
    if context.responses is None:
        raise not_found(response_id, param)
    return context.responses


def _limit_of(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LISTED))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LISTED:
        raise InvalidRequestError(f"limit is {text!r:.20}; it must be from 1 to {MAX_LISTED}", param="limit")
    return int(text)


async def _resolved(context: ServerContext, tenant: str, items: Sequence[Any]) -> list[Item]:
    """Replace item references by the items."""
    resolved: list[Item] = []
    known: dict[str, Item] = {}  # items of the referenced responses
    num_lookups = 0
    for item in items:
        if not isinstance(item, ItemReference):
            resolved.append(item)
            continue
        if item.id not in known and context.responses is not None:
            num_lookups += 1
            if num_lookups > MAX_LOOKUPS:
                raise InvalidRequestError(
                    f"input refers to items of more than {MAX_LOOKUPS} responses; send previous_response_id, "
                    "or the items themselves",
                    param="input",
                )
            output = await context.responses.output_with(tenant, item.id) or b"[]"
            ids = [one["id"] for one in _decode_items(output)]
            known.update(zip(ids, _parsed(output), strict=True))
        if item.id not in known:
            raise ApiError(404, f"input refers to item {item.id!r}, which is not stored", param="input")
        resolved.append(known[item.id])
    return resolved


def _parsed(items: bytes) -> list[Item]:
    """Return stored items."""
    if items == b"[]":
        return []
    parsed: list[Item] = _ITEMS.validate_json(items, context=Leniency(is_strict=False))
    return parsed


def _with_ids(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items with ids, as they are listed."""
    dumped = [item.model_dump(by_alias=True, exclude_none=True) for item in items]
    return [{"id": f"item_{secrets.token_hex(16)}", **item} for item in dumped]


_NO_RESPONSE = {
    404: "The response is not stored.",
    503: "The store of responses is not available.",
}

RESPONSE_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        create_response,
        ResponseAnswer,
        body=ResponsesRequest,
        event=ResponseAnswer,
        errors=GENERATION_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        ResponseAnswer,
        errors={400: "The response is not generated in the background.", **_NO_RESPONSE},
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        list_input_items,
        InputItemList,
        errors={400: "The limit is invalid.", **_NO_RESPONSE},
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}",
        get_response,
        ResponseAnswer,
        event=ResponseAnswer,
        errors={
            400: "starting_after is invalid.",
            409: "The response's events are not kept.",
            **_NO_RESPONSE,
        },
    ),
    Endpoint("DELETE", "/v1/responses/{response_id}", delete_response, DeletedResponse, errors=_NO_RESPONSE),
)
