"""Files and batches, which each engine has in a directory of its own: uploads, and lists of all engines."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import urllib.parse
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.cluster.answering import Answering, error_of
from quire.cluster.client_request import ClientRequest
from quire.cluster.engines.calls import EngineCalls, PromptKV
from quire.cluster.engines.metrics import Purpose
from quire.cluster.engines.registry import DECODERS, Engine, EngineState
from quire.cluster.engines.upstream import Answer, EngineRequest, EngineRequestError
from quire.cluster.owners import BATCHES, FILES, NO_PROMPT, answer_by_owner, cannot_ask, has_no_directory
from quire.server.batches.answers import Batch, BatchList, FileList, FileObject
from quire.server.batches.body import BatchQuery, FileQuery
from quire.server.wire.answers import json_response
from quire.server.wire.errors import ApiError
from quire.server.wire.validation import read_query

T = TypeVar("T")

MAX_LISTED = 1_000
"""Maximum length of a list."""

_MAX_LIST_BYTES = 1 << 24  # of one engine
_OF_THE_BODY = ("Content-Type", "Content-Encoding", "Expect")


def is_list(request: ClientRequest) -> bool:
    """Whether a request asks for the list of all files or batches."""
    return request.path in (FILES, BATCHES) and request.scope["method"] == "GET"


async def upload(calls: EngineCalls, asked: EngineRequest, answering: Answering) -> None:
    """Store a file with the engine that has least to do, of those that have a directory.

    What has been sent of a body cannot be sent to another engine, so an engine is first asked for its files.

    Raises:
        ApiError: no engine answered, or engines serve several models.
    """
    if len({frozenset(one.models) for one in calls.engines.of(DECODERS) if one.models}) > 1:
        raise ApiError(
            400,
            "files for batches cannot be stored here, since engines serve several models and a file would be "
            "with one of them; send it to a router or server of one model",
            code="several_models",
        )
    engine: Engine | None = None

    async def note(answer: Answer) -> None:
        nonlocal engine
        if answer.status == 200:
            engine = answer.engine
        else:
            await answering.answer_from(answer)

    await answer_by_owner(calls, _reading(asked, f"{FILES}?limit=1"), "a directory for files", note)
    if engine is None:
        return
    try:
        async with calls.answer(engine, Purpose.ANSWER, NO_PROMPT, PromptKV.COMPUTED, asked) as answer:
            await answering.answer_from(answer)
    except EngineRequestError as error:
        raise error_of(error) from error


async def answer_list(
    calls: EngineCalls, asked: EngineRequest, request: ClientRequest, answering: Answering
) -> None:
    """Merge the lists of all engines, by the time of creation, and then by the engine.

    Raises:
        InvalidRequestError: the query is invalid.
        ApiError: an engine did not answer, or cannot be asked.
    """
    merged = _MergedList(request)
    if (after := merged.after) is not None:
        path = f"{request.path}/{urllib.parse.quote(after, safe='')}"

        async def begin(answer: Answer) -> None:
            if answer.status == 200:
                merged.begin_after(answer)
            else:
                await answering.answer_from(answer)

        await answer_by_owner(calls, _reading(asked, path), repr(after), begin)
        if not merged.has_begun:
            return
    engines = calls.engines.of(DECODERS)
    not_up = [engine for engine in engines if engine.state is not EngineState.UP]
    if not_up or not engines:
        raise cannot_ask(not_up, "the list would lack what some engines keep")
    refusals: list[Answer] = []
    try:
        for engine in engines:
            read = _reading(asked, f"{request.path}?{urllib.parse.urlencode(merged.query_for(engine))}")
            async with calls.answer(engine, Purpose.ANSWER, NO_PROMPT, PromptKV.COMPUTED, read) as answer:
                if answer.status == 200:
                    await merged.add(answer)
                elif has_no_directory(answer):
                    refusals.append(answer)
                else:
                    await answering.answer_from(answer)
                    return
    except EngineRequestError as error:
        raise error_of(error) from error
    if len(refusals) == len(engines):
        await answering.answer_from(refusals[0])
    else:
        await merged.send()


class _MergedList:
    """The list that a request asks for, while it is put together.

    Args:
        request: the client's request.

    Raises:
        InvalidRequestError: its query is invalid.
    """

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._type: type[FileList] | type[BatchList] = FileList if request.path == FILES else BatchList
        given = Request(request.scope)
        query = read_query(given, FileQuery) if request.path == FILES else read_query(given, BatchQuery)
        self.after = query.after
        self._query = query.model_dump(exclude_none=True, exclude={"after"})
        self._limit = self._query["limit"] = min(query.limit, MAX_LISTED)
        self._step = 1 if self._query.get("order") == "asc" else -1  # from one time to the next
        self._before: tuple[int, str] | None = None  # key of what the list begins after
        self._entries: list[tuple[tuple[int, str], Any]] = []  # by their keys
        self._has_more = False

    @property
    def has_begun(self) -> bool:
        """Whether it is known where the list begins."""
        return self.after is None or self._before is not None

    def begin_after(self, answer: Answer) -> None:
        """Begin behind what an engine's answer describes."""
        self._before = self._key(_decoded(answer.engine, answer.body, _Created), answer.engine)

    def query_for(self, engine: Engine) -> dict[str, str | int]:
        """Return the query for an engine's part of the list."""
        if self._before is None:
            return self._query
        key, url = self._before
        if engine.url == url:
            return {**self._query, "after": self.after or ""}
        first = self._step * (key if engine.url > url else key + 1)
        given = self._query.get("from_time", first)
        return {**self._query, "from_time": max(0, self._step * max(self._step * first, self._step * given))}

    async def add(self, answer: Answer) -> None:
        """Add an engine's part of the list."""
        body = answer.body
        async with answer.watched():
            while not answer.is_whole and (piece := await answer.next_piece()):
                body += piece
                if len(body) > _MAX_LIST_BYTES:
                    raise EngineRequestError(
                        answer.engine, f"sent a list of more than {_MAX_LIST_BYTES} bytes"
                    )
        part = _decoded(answer.engine, body, self._type)
        entries = [(self._key(one, answer.engine), one) for one in part.data]
        merged = heapq.merge(self._entries, entries, key=lambda entry: entry[0])
        self._entries = list(itertools.islice(merged, self._limit + 1))
        self._has_more = self._has_more or part.has_more

    async def send(self) -> None:
        """Send the list to the client."""
        data = [one for _, one in self._entries[: self._limit]]
        response = json_response(
            self._type(
                data=data,
                first_id=data[0].id if data else None,
                last_id=data[-1].id if data else None,
                has_more=self._has_more or len(self._entries) > self._limit,
            )
        )
        start = {"type": "http.response.start", "status": 200, "headers": response.raw_headers}
        await self._request.send(start)
        await self._request.send({"type": "http.response.body", "body": response.body})
        self._request.is_answered = True

    def _key(self, one: FileObject | Batch | _Created, engine: Engine) -> tuple[int, str]:
        return self._step * one.created_at, engine.url


class _Created(msgspec.Struct):
    created_at: int


def _decoded(engine: Engine, body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise EngineRequestError(engine, f"gave no valid answer: {error}") from None


def _reading(asked: EngineRequest, path: str) -> EngineRequest:
    """Return a request of the same client that reads something."""
    headers = asked.headers.copy()
    for name in _OF_THE_BODY:
        headers.popall(name, None)
    return dataclasses.replace(asked, method="GET", path=path, headers=headers, body=b"")
