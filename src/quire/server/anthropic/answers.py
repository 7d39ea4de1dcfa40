"""Answers of /v1/messages and the events of its streams, in Anthropic's shapes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Raw, Struct

from quire.server.wire.answers import encode
from quire.server.wire.errors import ApiError, ErrorShape

NO_INPUT = Raw(b"{}")

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text for the user."""

    text: str


class ThinkingContent(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning, without a signature: it can be sent back unchanged."""

    thinking: str
    signature: str = ""


class ToolUseContent(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call; its input is empty in a stream, where deltas follow, and in an answer that was cut off."""

    id: str
    name: str
    input: Raw


ContentBlock: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class Usage(Struct, kw_only=True):
    """Token counts; the prompt has `input_tokens` plus the tokens from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageAnswer(Struct, kw_only=True, tag_field="type", tag="message"):
    """Answer of /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct, kw_only=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """A stream begins, with an empty message."""

    message: MessageAnswer


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, without its content."""

    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input, which is JSON once the block has ended."""

    partial_json: str


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block has ended."""

    index: int


class StopDetails(Struct, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The message has ended."""

    delta: StopDetails
    usage: Usage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The stream has ended."""


StreamEvent: TypeAlias = (
    MessageStart | BlockStart | ContentBlockDelta | BlockStop | MessageDelta | MessageStop
)


class ErrorContent(Struct, kw_only=True):
    """Type and message of an error."""

    type: str
    message: str


class ErrorAnswer(Struct, kw_only=True, tag_field="type", tag="error"):
    """Body of every error answer, and last event of a failed stream."""

    error: ErrorContent


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_answer(error: ApiError) -> ErrorAnswer:
    """Return an error in Anthropic's shape."""
    kind = _ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    return ErrorAnswer(error=ErrorContent(type=kind, message=error.message))


ANTHROPIC_ERRORS = ErrorShape(
    ErrorAnswer, error_answer, "/v1/messages", id_headers=("X-Request-Id", "Request-Id")
)


def named_event(payload: StreamEvent | ErrorAnswer) -> bytes:
    """Return one server-sent event, named after the payload's type."""
    return f"event: {payload.__struct_config__.tag}\ndata: ".encode() + encode(payload) + b"\n\n"
