"""POST /reset_prefix_cache."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import EngineDeadError
from quire.server.context import context_of, tenant_of
from quire.server.errors import ApiError
from quire.server.responses import ResetPrefixCache, json_response

RESET_TIMEOUT = 60.0
"""Seconds to wait for the engine, which may be within a long step."""


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes, of every tenant, if no KV block is in use."""
    context, tenant = context_of(request), tenant_of(request)
    if not tenant.sees_all:
        raise ApiError(
            403,
            f"the prefix cache is shared: the tenant {tenant.name!r} is no admin in the server's key file",
            code="not_permitted",
        )
    try:
        is_reset = await asyncio.wait_for(context.llm.reset_prefix_cache(), RESET_TIMEOUT)
    except TimeoutError:
        raise EngineDeadError(f"the engine has not answered for {RESET_TIMEOUT:g} s") from None
    if not is_reset:
        raise ApiError(
            409,
            "the prefix cache is in use by requests, pins or peers; try again when they have ended",
            code="prefix_cache_in_use",
        )
    return json_response(ResetPrefixCache())
