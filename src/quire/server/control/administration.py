"""Endpoints that affect all tenants: prefix cache reset, pause and sleep, of all models or one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import EngineDeadError
from quire.server.context import ServerContext, contexts_of, request_id_of, tenant_of
from quire.server.wire.answers import PauseStatus, ResetPrefixCache, SleepStatus, json_response
from quire.server.wire.errors import ApiError, as_api_error
from quire.server.wire.openapi import Endpoint
from quire.server.wire.validation import read_query

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM

T = TypeVar("T")

RESET_TIMEOUT = 60.0
"""Seconds to wait for the engine, which may be in a long step."""

Mode = Literal["abort", "wait", "keep"]


class PauseOptions(BaseModel):
    """The query of POST /pause; see `AsyncLLM.pause_generation`. `model` is read by `contexts_of`."""

    model: str | None = None
    mode: Mode = "abort"
    clear_cache: bool = True


class SleepOptions(BaseModel):
    """The query of POST /sleep; see `AsyncLLM.sleep`. The engine is ended completely at any level."""

    model: str | None = None
    mode: Mode = "abort"
    level: Literal["1", "2"] = "1"


async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache of all tenants, if no KV block is in use."""
    contexts = _contexts_of_admin(request, "the prefix cache")
    are_reset = await _of_all(request, contexts, _reset_prefix_cache)
    for context, is_reset in zip(contexts, are_reset, strict=True):
        if not is_reset:
            reason = "the prefix cache is in use by requests, pins or peers; try again when they have ended"
            raise ApiError(409, context.named(reason), code="prefix_cache_in_use")
    return json_response(ResetPrefixCache())


async def pause(request: Request) -> Response:
    """Pause the engine until POST /resume; new requests wait."""
    contexts = _contexts_of_controller(request)
    options = read_query(request, PauseOptions)
    are_cleared = await _of_all(
        request,
        contexts,
        lambda llm: llm.pause_generation(options.mode, clear_cache=options.clear_cache),
    )
    return json_response(PauseStatus(is_paused=True, is_cache_cleared=all(are_cleared)))


async def resume(request: Request) -> Response:
    """End the pause."""
    contexts = _contexts_of_controller(request)
    await _of_all(request, contexts, lambda llm: llm.resume_generation())
    return json_response(PauseStatus(is_paused=False))


async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused; of several, whether all are."""
    are_paused = [await context.llm.is_paused() for context in contexts_of(request)]
    return json_response(PauseStatus(is_paused=all(are_paused)))


async def sleep(request: Request) -> Response:
    """Stop the engine until POST /wake_up, and free its weights and KV."""
    contexts = _contexts_of_controller(request)
    mode = read_query(request, SleepOptions).mode
    await _of_all(request, contexts, lambda llm: llm.sleep(mode))
    return json_response(SleepStatus(is_sleeping=True))


async def wake_up(request: Request) -> Response:
    """Start a sleeping engine, and answer when it accepts requests."""
    contexts = _contexts_of_controller(request)
    await _of_all(request, contexts, lambda llm: llm.wake_up())
    return json_response(SleepStatus(is_sleeping=False))


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine is asleep; of several, whether all are."""
    are_sleeping = [await context.llm.is_sleeping() for context in contexts_of(request)]
    return json_response(SleepStatus(is_sleeping=all(are_sleeping)))


async def _reset_prefix_cache(llm: AsyncLLM) -> bool:
    try:
        async with asyncio.timeout(RESET_TIMEOUT):
            return await llm.reset_prefix_cache()
    except TimeoutError:
        raise EngineDeadError(f"the engine has not answered for {RESET_TIMEOUT:g} s") from None


async def _of_all(
    request: Request, contexts: Sequence[ServerContext], action: Callable[[AsyncLLM], Awaitable[T]]
) -> list[T]:
    """Return what `action` returns for each engine; they all act at once.

    Raises:
        ApiError: it failed for some, after it has ended for all; the message is of the first of these.
    """
    results = await asyncio.gather(*(action(each.llm) for each in contexts), return_exceptions=True)
    done: list[T] = []
    for context, result in zip(contexts, results, strict=True):
        if isinstance(result, Exception):
            answer = as_api_error(result, request_id=request_id_of(request))
            answer.message = context.named(answer.message)
            raise answer from result
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


def _contexts_of_controller(request: Request) -> Sequence[ServerContext]:
    """Return the contexts of the models that `request` is about, if the tenant may stop their engines.

    Raises:
        ApiError: 403: the tenant may not, or engine_control is off; 404: there is no such model.
    """
    contexts = _contexts_of_admin(request, "the engine")
    if not contexts[0].config.engine_control:
        raise ApiError(
            403,
            "this server's engine cannot be paused over HTTP; start it with --engine-control",
            code="not_permitted",
        )
    return contexts


def _contexts_of_admin(request: Request, what: str) -> Sequence[ServerContext]:
    """Return the contexts of the models that `request` is about, if the tenant may change what all share.

    Raises:
        ApiError: 403: the tenant may not; 404: there is no such model.
    """
    tenant = tenant_of(request)
    if not tenant.sees_all:
        raise ApiError(
            403,
            f"{what} is shared: the tenant {tenant.name!r} is not an admin in the server's key file",
            code="not_permitted",
        )
    return contexts_of(request)


_FOR_ADMINS = {
    400: "The query is invalid.",
    403: "The tenant may not.",
    404: "The model in the query is not served here.",
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
