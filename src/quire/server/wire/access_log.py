"""The access log: one line for each request, when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import itertools
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.wire.paths import POLLED_PATHS

if TYPE_CHECKING:
    from quire.request_output import RequestOutput


CLIENT_LEFT = 499
"""nginx's status for a client that disconnected before its answer."""

MAX_LINE_LENGTH = 2048  # bytes

_STATE = "access_record"
_MAX_LENGTHS = {"client": 64, "method": 16, "path": 256, "request_id": 128, "tenant": 64, "error": 128}
_UNPRINTED = re.compile(r"[^!#-\[\]-~]")  # or delimiters of the text format

Format = Literal["text", "json"]


MAX_WAITING = 4096
"""Maximum lines waiting to be written; more are dropped and counted."""

CLOSE_TIMEOUT = 1.0
"""Seconds to write the last lines."""

GATHERING_TIME = 0.05
"""Seconds for which lines are collected before they are written, so that the thread wakes less often."""


class LineWriter:
    """Writes lines to a descriptor in a separate thread.

    Lines that cannot be written are dropped; the next written line gives their number.

    Args:
        descriptor: to write to; stays open.
        dropped_line: returns a line about a number of dropped lines.
    """

    def __init__(self, descriptor: int, dropped_line: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._num_told = 0
        self._lock = threading.Lock()  # guards the two numbers
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Number of lines that were not written."""
        return self._num_dropped

    def write(self, line: bytes) -> None:
        """Queue a line, which ends with a line feed. Never blocks; thread-safe."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(line)
        else:
            self._drop(1)

    def close(self) -> None:
        """Wait until all lines are written, at most `CLOSE_TIMEOUT`."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines = [self._waiting.get()]
            self._closing.wait(GATHERING_TIME)
            with contextlib.suppress(queue.Empty):
                while lines[-1] is not None and len(lines) < MAX_WAITING:
                    lines.append(self._waiting.get_nowait())
            is_open = lines[-1] is not None
            self._write_all([line for line in lines if line is not None])

    def _write_all(self, lines: list[bytes]) -> None:
        with self._lock:
            num_dropped = self._num_dropped
        told = [self._dropped_line(num_dropped - self._num_told)] if num_dropped > self._num_told else []
        unwritten = memoryview(b"".join(itertools.chain(told, lines)))
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        except OSError:  # closed, or the disk is full
            self._drop(len(lines))
        else:
            self._num_told = num_dropped

    def _drop(self, num_lines: int) -> None:
        with self._lock:
            self._num_dropped += num_lines


class AccessRecord:
    """Log record of one request.

    Attributes:
        client: address of the client; "batch" for a line of a batch.
        method, path: HTTP method, and path as sent, without the query.
        request_id: its X-Request-Id, or a generated one.
        tenant: name of its tenant, set by the key check.
        status: status of the answer; 0: none was sent.
        error: code of the error.
    """

    __slots__ = (
        "_first_token_at", "_outputs", "_start", "client", "error", "method", "path", "request_id", "status",
        "tenant",
    )  # fmt: skip

    def __init__(self, *, client: str, method: str, path: str, request_id: str = "") -> None:
        self.client = client
        self.method = method
        self.path = path
        self.request_id = request_id
        self.tenant = ""
        self.status = 0
        self.error = ""
        self._outputs: dict[int, RequestOutput] = {}  # last output of each prompt
        self._start = time.perf_counter()
        self._first_token_at: float | None = None

    def observe(self, prompt_index: int, output: RequestOutput) -> None:
        """Observe a cumulative output of one of the request's prompts."""
        self._outputs[prompt_index] = output
        if self._first_token_at is None and any(one.token_ids for one in output.outputs):
            self._first_token_at = time.perf_counter()

    def fields(self) -> dict[str, Any]:
        """Return the names and values of the line's fields, the time of day first."""
        now = time.perf_counter()
        fields: dict[str, Any] = {"time": _time_of_day()}
        for name, max_length in _MAX_LENGTHS.items():
            if value := getattr(self, name):
                fields[name] = printable(value, max_length)
        fields |= {"status": self.status, "latency": round(now - self._start, 6)}
        if self._outputs:
            fields |= _tokens(self._outputs)
        if self._first_token_at is not None:
            fields["time_to_first_token"] = round(self._first_token_at - self._start, 6)
        return fields


class AccessLog:
    """Writes a line for each request; without a reader, lines are dropped (see `LineWriter`).

    Args:
        line_format: format of the lines.
        descriptor: to write to; stays open.
    """

    def __init__(self, line_format: Format, descriptor: int) -> None:
        self._to_line = _FORMATS[line_format]
        self.writer = LineWriter(descriptor, self._line_of_dropped)

    def write(self, record: AccessRecord) -> None:
        """Write the line of an ended request (on `POLLED_PATHS`, only if it failed). Never blocks."""
        if record.path in POLLED_PATHS and record.status < 400:
            return
        self.writer.write(self._to_line(record.fields()))

    @contextlib.contextmanager
    def noting(self, scope: MutableMapping[str, Any], record: AccessRecord) -> Iterator[AccessRecord]:
        """Attach `record` to a request, and write its line when it ends."""
        state = scope.setdefault("state", {})
        state[_STATE] = record
        try:
            yield record
        except BaseException as error:
            left = isinstance(error, asyncio.CancelledError)
            record.status = record.status or (CLIENT_LEFT if left else 500)
            record.error = record.error or ("cancelled" if left else "internal_error")
            raise
        finally:
            record.request_id = state.get("request_id", "")
            self.write(record)

    def _line_of_dropped(self, number: int) -> bytes:
        return self._to_line({"time": _time_of_day(), "dropped_lines": number})


@contextlib.contextmanager
def access_log(kind: Literal["off", "text", "json"]) -> Iterator[AccessLog | None]:
    """Yield a log on the standard output; None if it is off."""
    if kind == "off":
        yield None
        return
    log = AccessLog(kind, sys.stdout.fileno())
    try:
        yield log
    finally:
        log.writer.close()


class AccessLogging:
    """ASGI middleware: logs each request when it ends.

    Args:
        app: the application inside.
        log: the log.
    """

    def __init__(self, app: ASGIApp, *, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._log.noting(scope, record_of(scope)) as record:
            note_status = functools.partial(setattr, record, "status")
            await self._app(scope, receive, telling_status(send, note_status))


def telling_status(send: Send, note: Callable[[int], object]) -> Send:
    """Wrap an ASGI `send` to call `note` with the status when the answer starts."""

    async def send_noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            note(message["status"])
        await send(message)

    return send_noting


def access_record_of(scope: Mapping[str, Any]) -> AccessRecord | None:
    """Return the record of an ASGI request; None if there is none."""
    record: AccessRecord | None = scope.get("state", {}).get(_STATE)
    return record


def note_error(scope: Mapping[str, Any], error: str) -> None:
    """Set the error in the request's line, unless it has one."""
    if (record := access_record_of(scope)) is not None and not record.error:
        record.error = error


def printable(text: str, max_length: int) -> str:
    """Return a client's text as visible ASCII without quotes and spaces, truncated if long."""
    shown = _UNPRINTED.sub(lambda match: _escaped(match[0]), text[: max_length + 1])
    return shown if len(shown) <= max_length else f"{shown[: max_length - 3]}..."


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def record_of(scope: Mapping[str, Any]) -> AccessRecord:
    """Create the record of a new request."""
    client = scope.get("client")
    path = scope.get("raw_path")
    return AccessRecord(
        client=client[0] if client else "unix",
        method=scope["method"],
        path=path.decode("latin-1") if path else scope["path"],
    )


def _tokens(outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
    completions = [one for output in outputs.values() for one in output.outputs]
    reasons: dict[str, int] = {}
    for one in completions:
        if one.finish_reason is not None:
            reasons[one.finish_reason] = reasons.get(one.finish_reason, 0) + 1
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs.values()),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs.values()),
        "completion_tokens": sum(len(one.token_ids) for one in completions),
        "finish_reasons": reasons,
    }


def _time_of_day() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_line(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def _text_line(fields: dict[str, Any]) -> bytes:
    """Return the fields as `name=value`; the first ones, common to all requests, without names."""
    shown = [str(fields.pop("time"))]
    if "method" in fields:
        client, method, path, status = (fields.pop(name) for name in ("client", "method", "path", "status"))
        shown.append(f'{client} "{method} {path}" {status}')
    reasons = fields.pop("finish_reasons", None)
    shown += [f"{name}={value}" for name, value in fields.items()]
    if reasons:
        shown.append("finish_reasons=" + ",".join(f"{reason}:{count}" for reason, count in reasons.items()))
    return (" ".join(shown) + "\n").encode()


_FORMATS = {"text": _text_line, "json": _json_line}
