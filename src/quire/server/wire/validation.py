"""Parsing and validating request bodies, with actionable errors."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from quire.errors import InvalidRequestError, nearest_name
from quire.front.text import tokenized_prompt
from quire.server.wire import other_names, strict_model
from quire.server.wire.bodies import (
    CONTINUATION,
    ENCODINGS,
    MAX_PROGRESS,
    Decompressor,
    bounded_body,
    size_behind,
)
from quire.server.wire.errors import ApiError
from quire.server.wire.leniency import Leniency

BodyT = TypeVar("BodyT", bound=BaseModel)

_SUBJECT = re.compile(r"^\w+(?= should)")  # pydantic begins with "Input should", "List should"
# Parameter of a header: name and value.
_PARAMETER = re.compile(r"""(?:^|;)\s*([^\s=;"]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)""")
_NO_BACKSLASH = re.compile(rb"[^\\]")
_MAX_SHOWN = 80  # characters of a value or a name

MAX_OBJECTS = 4_096
"""Maximum objects in a body; each takes microseconds to check."""

MAX_VALUES = 65_536
"""Maximum values in a body, besides the token ids of a prompt."""

COUNTED_PER_TURN = 262_144
"""Bytes of a body counted per turn of the event loop, in less than a millisecond."""


async def read_body(
    request: Request,
    model: type[BodyT],
    *,
    max_body_bytes: int,
    max_prompt_tokens: int,
    leniency: Leniency,
    takes_any_type: bool = False,
) -> BodyT:
    """Return the request's JSON body as `model`.

    Args:
        request: the request.
        model: type of the body.
        max_body_bytes: maximum size of the body.
        max_prompt_tokens: how many values the body may have besides `MAX_VALUES`.
        leniency: what to ignore; collects the ignored fields.
        takes_any_type: whether the body is JSON regardless of its Content-Type.

    Raises:
        ApiError: 413: the body is too large; 415: its type or encoding is not supported.
        InvalidRequestError: the body is not JSON in UTF-8, or does not fit `model`.
        ClientGoneError: the connection closed before the body was complete.
    """
    if not takes_any_type:
        _require_json(request)
    sizes = {
        "tokenized": size_behind(request, tokenized_prompt.HEADER, tokenized_prompt.MAX_BYTES),
        "progress": size_behind(request, CONTINUATION, MAX_PROGRESS),
    }
    limit = max_body_bytes + sum(sizes.values())
    body = await bounded_body(request, limit, _decompressor(request, limit))
    for name, size in sizes.items():
        if size:
            body, request.scope["state"][name] = body[:-size], body[-size:]
    await _require_few_values(body, MAX_VALUES + max_prompt_tokens)
    if await _names_no_number(body):
        _require_json_numbers(body)
    try:
        return model.model_validate_json(body, context=leniency)
    except ValidationError as error:
        _require_utf8(body)
        details = error.errors(include_url=False)
        raise _explained(details[0]) from None


def read_query(request: Request, model: type[BodyT]) -> BodyT:
    """Return the parameters of the request's URL as `model`.

    Raises:
        InvalidRequestError: they do not fit `model`.
    """
    given = dict(request.query_params)
    for name in given:
        if name not in model.model_fields:
            hint = nearest_name(name, model.model_fields)
            raise InvalidRequestError(f"unknown parameter {name!r}; {hint}", param=name)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None


def _require_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = content_type.partition(";")
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, f"Content-Type is {content_type!r}; it must be 'application/json'")
    charset = _charset(parameters)
    if charset not in ("", "utf-8", "utf8"):
        raise ApiError(415, f"the charset is {charset!r}; it must be utf-8")


def _charset(parameters: str) -> str:
    """Return the parameter `charset` in lower case; empty: there is none."""
    for name, value in _PARAMETER.findall(parameters):
        if name.lower() == "charset":
            charset: str = value.strip().strip('"').lower()
            return charset
    return ""


def _decompressor(request: Request, limit: int) -> Decompressor | None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding not in ENCODINGS:
        raise ApiError(415, f"Content-Encoding is {encoding!r}; it must be one of {', '.join(ENCODINGS)}")
    return Decompressor(encoding, limit)


async def _require_few_values(body: bytes, max_values: int) -> None:
    """Refuse a body with so many values that parsing would take long."""
    limits = {b"{": (MAX_OBJECTS, "objects, such as messages"), b",": (max_values, "values")}
    counts = dict.fromkeys(limits, 0)
    for start in range(0, len(body), COUNTED_PER_TURN):
        if start:
            await asyncio.sleep(0)
        for mark in counts:
            counts[mark] += body.count(mark, start, start + COUNTED_PER_TURN)
    if all(counts[mark] <= limit for mark, (limit, _) in limits.items()):
        return  # whatever is inside strings
    counts = await asyncio.to_thread(count_outside_strings, body, b"".join(limits))
    for mark, (limit, what) in limits.items():
        if counts[mark] > limit:
            raise ApiError(
                413,
                f"the body has {counts[mark]} {what}; at most {limit} are accepted; "
                "send several smaller requests",
                code="body_too_large",
            )


def count_outside_strings(body: bytes, marks: bytes, *, piece_bytes: int = 65_536) -> dict[bytes, int]:
    """Return how often each of these characters occurs in a JSON text outside its strings.

    Args:
        body: the text.
        marks: the characters.
        piece_bytes: bytes searched at a time, while the GIL is held.
    """
    counts = {bytes([mark]): 0 for mark in marks}
    start = num_quotes = 0
    while start < len(body):
        last = _NO_BACKSLASH.search(body, start + piece_bytes - 1)  # so that pieces do not split escapes
        end = last.end() if last else len(body)
        text = np.frombuffer(body[start:end].replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        is_quote = text == ord('"')
        is_outside = (np.cumsum(is_quote, dtype=np.uint8) + num_quotes % 2) % 2 == 0
        for mark in counts:
            counts[mark] += int(np.count_nonzero((text == ord(mark)) & is_outside))
        num_quotes += int(np.count_nonzero(is_quote))
        start = end
    return counts


async def _names_no_number(body: bytes) -> bool:
    """Whether NaN or Infinity occurs anywhere: much faster than finding out where."""
    for start in range(0, len(body), COUNTED_PER_TURN):
        if start:
            await asyncio.sleep(0)
        end = start + COUNTED_PER_TURN + len("Infinity")
        if body.find(b"NaN", start, end) >= 0 or body.find(b"Infinity", start, end) >= 0:
            return True
    return False


def _require_json_numbers(body: bytes) -> None:
    """Refuse NaN and Infinity outside strings, which pydantic accepts as numbers."""
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        _require_utf8(body)
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}; NaN and Infinity are not JSON"
        ) from None


def _require_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the body is not UTF-8: {error.reason}, 0x{body[error.start]:02x} at byte {error.start}"
        ) from None


def _explained(error: ErrorDetails) -> InvalidRequestError:
    """Convert the first validation error: the field's path, its value, and what is allowed."""
    path = _path_text(error["loc"])
    param = path or None
    match error["type"]:
        case "json_invalid":
            reason = error.get("ctx", {}).get("error", error["msg"])
            return InvalidRequestError(f"the body is not valid JSON: {reason}")
        case strict_model.UNKNOWN_NAME:
            context = error["ctx"]
            path = _path_text((*error["loc"], context["name"]))
            return InvalidRequestError(f"unknown parameter {path!r}; {context['hint']}", param=path)
        case other_names.TWO_NAMES:
            name, own_name = error["ctx"]["name"], error["ctx"]["own_name"]
            return InvalidRequestError(
                f"{name} and {own_name} mean the same and differ; give one of them", param=name
            )
        case "missing":
            return InvalidRequestError(f"{path} is missing; it is required", param=param)
        case "none_required":
            return InvalidRequestError(f"{path} is not supported by Quire; leave it out", param=param)
    complaint = _SUBJECT.sub("it", error["msg"], count=1).replace(" after validation", "")
    return InvalidRequestError(f"{path or 'the body'} is {_shown(error['input'])}; {complaint}", param=param)


def _path_text(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].content` for `("messages", 0, "content", "=text")`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith(strict_model.TAG_PREFIX) and part != "[key]":
            text += f".{_shortened(part)}" if text else _shortened(part)
    return text


def _shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    if isinstance(value, list | dict) and len(value) > 10:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} items"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
