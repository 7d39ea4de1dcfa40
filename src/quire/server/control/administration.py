"""Endpoints that affect all tenants: prefix cache reset, pause and sleep."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import EngineDeadError
from quire.server.context import ServerContext, context_of, tenant_of
from quire.server.wire.answers import PauseStatus, ResetPrefixCache, SleepStatus, json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.openapi import Endpoint
from quire.server.wire.validation import read_query

RESET_TIMEOUT = 60.0
"""Seconds to wait for the engine, which may be in a long step."""

Mode = Literal["abort", "wait", "keep"]


class PauseOptions(BaseModel):
    """The query of POST /pause; see `AsyncLLM.pause_generation`."""

    mode: Mode = "abort"
    clear_cache: bool = True


class SleepOptions(BaseModel):
    """The query of POST /sleep; see `AsyncLLM.sleep`. The engine is ended completely at any level."""

    mode: Mode = "abort"
    level: Literal["1", "2"] = "1"


async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache of all tenants, if no KV block is in use."""
    context = _context_of_admin(request, "the prefix cache")
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


async def pause(request: Request) -> Response:
    """Pause the engine until POST /resume; new requests wait."""
    context = _context_of_controller(request)
    options = read_query(request, PauseOptions)
    is_cleared = await context.llm.pause_generation(options.mode, clear_cache=options.clear_cache)
    return json_response(PauseStatus(is_paused=True, is_cache_cleared=is_cleared))


async def resume(request: Request) -> Response:
    """End the pause."""
    await _context_of_controller(request).llm.resume_generation()
    return json_response(PauseStatus(is_paused=False))


async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused."""
    return json_response(PauseStatus(is_paused=await context_of(request).llm.is_paused()))


async def sleep(request: Request) -> Response:
    """Stop the engine until POST /wake_up, and free its weights and KV."""
    context = _context_of_controller(request)
    await context.llm.sleep(read_query(request, SleepOptions).mode)
    return json_response(SleepStatus(is_sleeping=True))


async def wake_up(request: Request) -> Response:
    """Start a sleeping engine, and answer when it accepts requests."""
    await _context_of_controller(request).llm.wake_up()
    return json_response(SleepStatus(is_sleeping=False))


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine is asleep."""
    return json_response(SleepStatus(is_sleeping=await context_of(request).llm.is_sleeping()))


def _context_of_controller(request: Request) -> ServerContext:
    """Return the server's context if the tenant may stop the engine.

    Raises:
        ApiError: 403: the tenant may not, or engine_control is off.
    """
    context = _context_of_admin(request, "the engine")
    if not context.config.engine_control:
        raise ApiError(
            403,
            "this server's engine cannot be paused over HTTP; start it with --engine-control",
            code="not_permitted",
        )
    return context


def _context_of_admin(request: Request, what: str) -> ServerContext:
    """Return the server's context if the tenant may change what all tenants share.

    Raises:
        ApiError: 403, the tenant may not.
    """
    tenant = tenant_of(request)
    if not tenant.sees_all:
        raise ApiError(
            403,
            f"{what} is shared: the tenant {tenant.name!r} is not an admin in the server's key file",
            code="not_permitted",
        )
    return context_of(request)


_FOR_ADMINS = {
    400: "The query is invalid.",
    403: "The tenant may not.",
    503: "The engine is not available.",
}

ADMINISTRATION_ENDPOINTS = (
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        ResetPrefixCache,
        errors={409: "KV blocks are in use.", **_FOR_ADMINS},
    ),
    *(
        Endpoint("POST", path, handler, answer, errors=_FOR_ADMINS)
        for path, handler, answer in (
            ("/pause", pause, PauseStatus),
            ("/resume", resume, PauseStatus),
            ("/sleep", sleep, SleepStatus),
            ("/wake_up", wake_up, SleepStatus),
        )
    ),
    Endpoint("GET", "/is_paused", is_paused, PauseStatus),
    Endpoint("GET", "/is_sleeping", is_sleeping, SleepStatus),
)
