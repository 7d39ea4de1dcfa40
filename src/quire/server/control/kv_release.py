"""/v1/kv_transfers: KV that is held for another engine, and will not be read."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.kv.peers.transfer_params import TransferId
from quire.server.context import context_of, tenant_of
from quire.server.wire.answers import ReleasedKV, json_response
from quire.server.wire.errors import ApiError


async def release_kv(request: Request) -> Response:
    """Free what is held under a transfer id, now or when it comes; nothing happens if that is over."""
    context = context_of(request)
    tenant_of(request).require_kv_transfer("/v1/kv_transfers")
    try:
        transfer_id: str = msgspec.convert(request.path_params["transfer_id"], TransferId)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the transfer_id is invalid: {error}") from error
    if context.llm.info.kv_transfer_address is None:
        raise ApiError(
            404, "this engine lends no KV; --role prefill has it do so", code="kv_transfer_not_found"
        )
    context.llm.release_kv(transfer_id)
    return json_response(ReleasedKV(id=transfer_id))
