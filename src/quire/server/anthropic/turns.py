"""Messages of a conversation in Anthropic's form, converted to OpenAI's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.dialogue.earlier_turns import text_of
from quire.errors import InvalidRequestError
from quire.server.calls.tool_fields import CalledName, CallId
from quire.server.wire.strict_model import Ignored, JsonObject, StrictModel, text_or_list


class TextBlock(StrictModel):
    """Text."""

    path_prefix = "content[]."

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(StrictModel):
    """The model's reasoning in an earlier turn."""

    path_prefix = "messages[].content[]."

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None
    cache_control: Ignored = None


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning of another service, which is not shown to the model."""

    path_prefix = "messages[].content[]."

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(StrictModel):
    """A tool that the model called in an earlier turn."""

    path_prefix = "messages[].content[]."

    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: JsonObject
    cache_control: Ignored = None
    caller: Ignored = None


TextBlocks = Annotated[
    Annotated[str, Tag("=text")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("=parts")],
    text_or_list("=parts", "a string or a list of text blocks"),
]


class ToolResultBlock(StrictModel):
    """The result of a tool that the model called."""

    path_prefix = "messages[].content[]."

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextBlocks | None = None
    is_error: bool | None = Field(None, description="Not used: the model only sees the content.")
    cache_control: Ignored = None


_TAGS_OF_TYPES = {
    "text": "=text_block",
    "thinking": "=thinking",
    "redacted_thinking": "=redacted",
    "tool_use": "=tool_use",
    "tool_result": "=tool_result",
}


def _block_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return _TAGS_OF_TYPES.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("=text_block")]
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[RedactedThinkingBlock, Tag("=redacted")]
    | Annotated[ToolUseBlock, Tag("=tool_use")]
    | Annotated[ToolResultBlock, Tag("=tool_result")],
    Discriminator(
        _block_form,
        custom_error_type="form",
        custom_error_message="its type must be text, tool_use, tool_result, thinking or redacted_thinking; "
        "images and documents are not taken",
    ),
]
Blocks = Annotated[
    Annotated[str, Tag("=text")] | Annotated[list[Block], Field(fail_fast=True), Tag("=parts")],
    text_or_list("=parts", "a string or a list of content blocks"),
]


class Message(StrictModel):
    """One turn."""

    path_prefix = "messages[]."

    role: Literal["user", "assistant", "system"]
    content: Blocks


def openai_messages(
    system: str | Sequence[TextBlock] | None, messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form.

    As in Anthropic's API, successive messages of one side are merged; many templates refuse them.

    Args:
        system: the system prompt.
        messages: the body's messages.

    Raises:
        InvalidRequestError: a message has blocks that do not belong there.
    """
    given: list[dict[str, Any]] = []
    if content := _content_of(system):
        given.append({"role": "system", "content": content})
    call_ids: set[str] = set()
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        turns = list(group)
        content = _joined([turn.content for turn in turns])
        if role == "assistant":
            one = [_assistant_message(content, call_ids)]
        else:
            one = _other_messages(role, content, call_ids)
        if len(turns) > 1:  # templates may put nothing between text parts
            one = [{**message, "content": text_of(message["content"])} for message in one]
        given += one
    return given


def _joined(contents: Sequence[str | list[Any]]) -> str | list[Any]:
    """Return the content of merged messages."""
    if len(contents) == 1:
        return contents[0]
    blocks: list[Any] = []
    for content in contents:
        blocks += [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    return blocks


def _content_of(content: str | Sequence[TextBlock] | None) -> str | list[dict[str, str]]:
    """Return the content of a message, with a part for each block; "" if there is none."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": block.text} for block in content] or ""


def _assistant_message(content: str | list[Any], call_ids: set[str]) -> dict[str, Any]:
    """Convert an assistant message; add the ids of its calls to `call_ids`."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[TextBlock] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                call_ids.add(block.id)
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise InvalidRequestError(
                    "an assistant's message has a tool_result block; results are the user's", param="messages"
                )
    given: dict[str, Any] = {"role": "assistant", "content": _content_of(texts)}
    if reasoning:
        given["reasoning_content"] = "\n".join(reasoning)
    if calls:
        given["tool_calls"] = calls
    return given


def _other_messages(role: str, content: str | list[Any], call_ids: set[str]) -> list[dict[str, Any]]:
    """Convert a user or system message; its tool results become separate messages."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    given: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for block in content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock(tool_use_id=call_id):
                if call_id not in call_ids:
                    raise InvalidRequestError(
                        f"a tool_result has the tool_use_id {call_id!r}, which no tool_use before it has",
                        param="messages",
                    )
                given.append({"role": "tool", "tool_call_id": call_id, "content": _content_of(block.content)})
            case _:
                raise InvalidRequestError(
                    f"a message of the {role}'s has a {block.type} block, which is the assistant's",
                    param="messages",
                )
    if texts or not given:
        given.append({"role": role, "content": _content_of(texts)})
    return given
