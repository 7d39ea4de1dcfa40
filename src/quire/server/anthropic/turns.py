"""Turns of a conversation in Anthropic's form: blocks of content, and messages for chat templates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.dialogue.earlier_turns import NAMES_OF_THOUGHTS
from quire.dialogue.tool_call_format import ToolCallFormat
from quire.errors import InvalidRequestError
from quire.server.strict_model import Ignored, JsonObject, StrictModel, text_or_list
from quire.server.tool_fields import CalledName, CallId


class TextBlock(StrictModel):
    """Text."""

    path_prefix = "content[]."

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(StrictModel):
    """What the model thought in an earlier turn."""

    path_prefix = "messages[].content[]."

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None
    cache_control: Ignored = None


class RedactedThinkingBlock(StrictModel):
    """A thought that only another service can read; the model is not shown it."""

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
    """What a tool that the model called returned."""

    path_prefix = "messages[].content[]."

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextBlocks | None = None
    is_error: bool | None = Field(None, description="The model is shown the content only.")
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


def messages_for_template(
    system: str | Sequence[TextBlock] | None, messages: Sequence[Message], call_format: ToolCallFormat | None
) -> list[dict[str, Any]]:
    """Return a conversation as chat templates expect it.

    Turns of the same side that follow one another are one, as in Anthropic's API: many templates refuse them.

    Args:
        system: what the model is told before it.
        messages: of the body.
        call_format: of the model's calls; None if it is unknown.

    Raises:
        InvalidRequestError: blocks are in messages where they make no sense.
    """
    rendered: list[dict[str, Any]] = []
    if system is not None and (text := text_of(system)):
        rendered.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for role, turns in itertools.groupby(messages, key=lambda message: message.role):
        content = _joined([turn.content for turn in turns])
        if role == "assistant":
            rendered.append(_assistant_message(content, names, call_format))
        else:
            rendered += _other_messages(role, content, names)
    return rendered


def _joined(contents: Sequence[str | list[Any]]) -> str | list[Any]:
    """Return the content of turns that are one."""
    if len(contents) == 1:
        return contents[0]
    blocks: list[Any] = []
    for content in contents:
        blocks += [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    return blocks


def text_of(content: str | Sequence[TextBlock] | None) -> str:
    """Return the text of blocks, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _assistant_message(
    content: str | list[Any], names: dict[str, str], call_format: ToolCallFormat | None
) -> dict[str, Any]:
    """Return a turn of the model's; note the names of the tools that it calls by the calls' ids."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                names[block.id] = block.name
                as_text = call_format is not None and call_format.arguments_as_text
                arguments = json.dumps(block.input, ensure_ascii=False) if as_text else block.input
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise InvalidRequestError(
                    "an assistant's message has a tool_result block; results are the user's", param="messages"
                )
    rendered: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        rendered.update(dict.fromkeys(NAMES_OF_THOUGHTS, "\n".join(thoughts)))
    if calls:
        rendered["tool_calls"] = calls
        if call_format is not None and call_format.null_content and not texts:
            rendered["content"] = None
    return rendered


def _other_messages(role: str, content: str | list[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return a turn of the user's or the system's: the results of tools in it are messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    rendered: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for block in content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock(tool_use_id=call_id):
                if call_id not in names:
                    raise InvalidRequestError(
                        f"a tool_result has the tool_use_id {call_id!r}, which no tool_use before it has",
                        param="messages",
                    )
                result = {"role": "tool", "tool_call_id": call_id, "name": names[call_id]}
                rendered.append({**result, "content": text_of(block.content)})
            case _:
                raise InvalidRequestError(
                    f"a message of the {role}'s has a {block.type} block, which is the assistant's",
                    param="messages",
                )
    if texts or not rendered:
        rendered.append({"role": role, "content": text_of(texts)})
    return rendered
