"""Requests about what one engine keeps (responses, files, batches): engines are asked until one has it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from quire.cluster.answering import error_of
from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.calls import EngineCalls, PromptKV
from quire.cluster.engines.metrics import Purpose
from quire.cluster.engines.registry import DECODERS, Engine
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.cluster.prompts import Prompt
from quire.server.batches.answers import KEPT_ELSEWHERE
from quire.server.wire.errors import UNAVAILABLE, ApiError

logger = logging.getLogger(__name__)

RESPONSES = "/v1/responses"
FILES = "/v1/files"
BATCHES = "/v1/batches"

NO_PROMPT = Prompt(b"")

_BUSY = (429, 503)
_MAX_SHOWN = 200  # characters of an id
_KEPT_ELSEWHERE = f'"{KEPT_ELSEWHERE}"'.encode()
_NO_BATCHES = b'"no_batches"'


class _References(msgspec.Struct):
    input_file_id: str = ""
    previous_response_id: str | None = None


def needs_owner(request: ClientRequest) -> bool:
    """Whether only the engine that keeps what the request names can answer it."""
    path = request.path
    if path.startswith((f"{RESPONSES}/", f"{FILES}/", f"{BATCHES}/")):
        return True
    if request.scope["method"] != "POST":
        return path == RESPONSES
    refers = any(name in request.body for name in (b"previous_response_id", b"item_reference"))
    return path == BATCHES or (path == RESPONSES and refers)


async def answer_by_owner(
    calls: EngineCalls,
    asked: EngineRequest,
    named: str,
    use: Callable[[Answer], Awaitable[None]],
    model: str = "",
) -> None:
    """Ask all engines in turn, and use the first answer other than that it is not there.

    An engine without it refuses before doing any work, so asking is cheap. Only when all have answered is it
    certain that none has it.

    Args:
        calls: sends requests to engines.
        asked: the request.
        named: what is looked for.
        use: takes the answer.
        model: name of the model that is to answer; empty: any.

    Raises:
        ApiError: an engine that may have it did not answer, or cannot be asked.
    """
    prompt = Prompt(b"", model=model)
    tried: list[Engine] = []
    missing: list[Answer] = []
    busy: Answer | None = None
    failure: EngineRequestError | None = None
    while (engine := calls.engines.choose(DECODERS, prompt, excluded=tried)) is not None:
        tried.append(engine)
        try:
            async with calls.answer(engine, Purpose.ANSWER, prompt, PromptKV.COMPUTED, asked) as answer:
                if _is_missing(answer):
                    missing.append(answer)
                elif answer.status in _BUSY and answer.is_whole:
                    busy = answer
                else:
                    await use(answer)
                    return
        except EngineRequestError as error:
            logger.warning("%s", error)
            failure = error
    if busy is not None:
        await use(busy)
        return
    if failure is not None:
        raise error_of(failure)
    others = [engine for engine in calls.engines.of(DECODERS, model) if engine not in tried]
    if others or not missing:
        raise cannot_ask(others, f"no engine that can be asked has {named}")
    await use(_clearest(missing, named))


def cannot_ask(engines: list[Engine], problem: str) -> ApiError:
    """Return the error of a request for what engines keep that cannot be asked now."""
    states = "; ".join(f"{one.url} is {one.described_state}" for one in engines[:8])
    return _unavailable(f"{problem}: {states or 'there is none that generates'}")


def has_no_directory(answer: Answer) -> bool:
    """Whether an engine has refused a request because it keeps no files."""
    return _is_missing(answer) and _NO_BATCHES in answer.body


def named_in(request: ClientRequest) -> str:
    """Return, for messages, the id of what a request is about."""
    parts = request.path.split("/")
    named = parts[3] if len(parts) > 3 else ""
    if not named:
        try:
            references = msgspec.json.decode(request.body, type=_References)
            named = references.input_file_id or references.previous_response_id or ""
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            pass  # the engine reports it
    return repr(named[:_MAX_SHOWN]) if named else "it"


def _clearest(missing: list[Answer], named: str) -> Answer:
    """Return the answer of an engine that would have it, or of one without files if all are.

    Raises:
        ApiError: 503: the directory that it was made for is with none of them.
    """
    certain = [one for one in missing if _KEPT_ELSEWHERE not in one.body and not has_no_directory(one)]
    if certain:
        return certain[0]
    if any(_KEPT_ELSEWHERE in one.body for one in missing):
        raise _unavailable(f"{named} is in a directory that no engine has now; its engine may be restarting")
    return missing[0]


def _is_missing(answer: Answer) -> bool:
    return answer.status == 404 and answer.is_whole and b'"model_not_found"' not in answer.body


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind=UNAVAILABLE, code="no_engine")
