"""Requests about stored responses: engines are asked in turn until one has the response."""

from __future__ import annotations

import logging

from quire.cluster.answering import Answering, error_of
from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.calls import EngineCalls, PromptKV
from quire.cluster.engines.metrics import Purpose
from quire.cluster.engines.registry import DECODERS, Engine
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.cluster.prompts import Prompt
from quire.server.wire.errors import UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

PATH = "/v1/responses"

_BUSY = (429, 503)


def needs_owner(request: ClientRequest) -> bool:
    """Whether only the engine with a stored response can answer: not for a new one that continues none."""
    is_new = request.path == PATH and request.scope["method"] == "POST"
    refers = any(name in request.body for name in (b"previous_response_id", b"item_reference"))
    return request.path.startswith(PATH) and (refers or not is_new)


async def answer_by_owner(calls: EngineCalls, asked: EngineRequest, answering: Answering) -> None:
    """Ask all engines in turn, and relay the first answer other than 404.

    An engine without the response refuses before doing any work, so asking is cheap. Only when all have
    answered is it certain that none has it.

    Args:
        calls: sends requests to engines.
        asked: the request.
        answering: sends an engine's answer to the client.

    Raises:
        ApiError: an engine that may have it did not answer, or cannot be asked.
    """
    prompt = Prompt(b"")
    tried: list[Engine] = []
    missing: Answer | None = None
    busy: Answer | None = None
    failure: EngineRequestError | None = None
    while (engine := calls.engines.choose(DECODERS, prompt, excluded=tried)) is not None:
        tried.append(engine)
        try:
            async with calls.answer(engine, Purpose.ANSWER, prompt, PromptKV.COMPUTED, asked) as answer:
                if _is_missing(answer):
                    missing = answer
                elif answer.status in _BUSY and answer.is_whole:
                    busy = answer
                else:
                    await answering.answer_from(answer)
                    return
        except EngineRequestError as error:
            logger.warning("%s", error)
            failure = error
    if busy is not None:
        await answering.answer_from(busy)
        return
    if failure is not None:
        raise error_of(failure)
    others = [engine for engine in calls.engines.of(DECODERS) if engine not in tried]
    if others or missing is None:
        raise _cannot_ask(others)
    await answering.answer_from(missing)


def _is_missing(answer: Answer) -> bool:
    return answer.status == 404 and answer.is_whole and b'"model_not_found"' not in answer.body


def _cannot_ask(engines: list[Engine]) -> ApiError:
    states = "; ".join(f"{one.url} is {one.described_state}" for one in engines[:8])
    return ApiError(
        503,
        f"no engine that can be asked has it: {states or 'there is none that generates'}",
        kind=UNAVAILABLE,
        code="no_engine",
    )
