"""Answers of /v1/responses and the events of its streams, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from quire.server.wire.answers import TokenLogprob, encode

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text for the user; `logprobs` are empty unless asked for."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message to the user."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class OutputReasoning(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning before a message or a call, without a summary."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of one of the request's tools; the arguments are JSON as the model wrote it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "in_progress"


OutputItem: TypeAlias = OutputReasoning | OutputMessage | OutputCall


class InputTokensDetails(Struct):
    """Number of prompt tokens from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Number of output tokens before the end of reasoning."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseAnswer(Struct, kw_only=True):
    """Answer of /v1/responses; parameters are returned as given."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Mapping[str, Any]
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: Usage | None = None
    user: str | None


class DeletedResponse(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Struct, kw_only=True):
    """Answer of /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Struct, kw_only=True, tag_field="type"):
    """An event of a stream, numbered from 0."""

    sequence_number: int


class Created(ResponseEvent, kw_only=True, tag="response.created"):
    """The response exists."""

    response: ResponseAnswer


class Queued(ResponseEvent, kw_only=True, tag="response.queued"):
    """The response is waiting to be generated in the background."""

    response: ResponseAnswer


class InProgress(ResponseEvent, kw_only=True, tag="response.in_progress"):
    """The response is being generated."""

    response: ResponseAnswer


class Completed(ResponseEvent, kw_only=True, tag="response.completed"):
    """The response is complete."""

    response: ResponseAnswer


class Incomplete(ResponseEvent, kw_only=True, tag="response.incomplete"):
    """The response was cut off."""

    response: ResponseAnswer


class Failed(ResponseEvent, kw_only=True, tag="response.failed"):
    """The response has failed; this is the last event."""

    response: ResponseAnswer


class ItemEvent(ResponseEvent, kw_only=True):
    """An event about one item."""

    output_index: int
    item_id: str


class ItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class PartAdded(ItemEvent, kw_only=True, tag="response.content_part.added"):
    """A part of a message or reasoning begins."""

    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(ItemEvent, kw_only=True, tag="response.content_part.done"):
    """A part of a message or reasoning is complete."""

    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(ItemEvent, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(ItemEvent, kw_only=True, tag="response.output_text.done"):
    """A text is complete."""

    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(ItemEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More of reasoning."""

    content_index: int = 0
    delta: str


class ReasoningDone(ItemEvent, kw_only=True, tag="response.reasoning_text.done"):
    """Reasoning is complete."""

    content_index: int = 0
    text: str


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's arguments are complete."""

    name: str
    arguments: str


class StreamError(ResponseEvent, kw_only=True, tag="error"):
    """An error, followed by `response.failed`."""

    code: str | None
    message: str
    param: str | None


def named_event(event: ResponseEvent) -> bytes:
    """Return one server-sent event, named after the event's type."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + encode(event) + b"\n\n"
