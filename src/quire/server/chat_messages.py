"""Messages of chat completions, as bodies have them and as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from quire.dialogue.earlier_turns import NAMES_OF_THOUGHTS
from quire.dialogue.tool_call_format import ToolCallFormat
from quire.server.strict_model import Ignored, StrictModel, Unsupported, text_or_list
from quire.server.tool_fields import MAX_CALLS, CalledName, CallId, MessageToolCall

Role = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(StrictModel):
    """A part of a message's content."""

    path_prefix = "messages[].content[]."

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("=parts")],
    text_or_list("=parts", "a string or a list of text parts"),
]


class ChatMessage(StrictModel):
    """One message; which roles there are, and in which order, is the chat template's affair."""

    path_prefix = "messages[]."

    role: Role
    content: Content | None = Field(
        None, validate_default=True, description="Only an assistant's message may have none."
    )
    name: CalledName | None = Field(
        None, description="Of the speaker or the tool, for templates that show it."
    )
    tool_call_id: CallId | None = Field(
        None, description="In a tool's message: which call it is the result of."
    )
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = Field(
        None, description="The tools that the assistant called."
    )
    reasoning_content: str | None = Field(
        None, description="What the assistant thought, for templates that show it."
    )
    reasoning: str | None = Field(None, description="The newer name of reasoning_content.")
    annotations: Ignored = None
    audio: Unsupported = None
    function_call: Unsupported = None
    refusal: Ignored = None

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("no_content", "only an assistant's message may have no content")
        return content

    @property
    def text(self) -> str:
        """The content, its parts joined; "" if there is none."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


def messages_for_template(
    messages: Sequence[ChatMessage], call_format: ToolCallFormat | None
) -> list[dict[str, Any]]:
    """Return a conversation for the model's template, which shows calls in its own way.

    The result of a tool gets the tool's name, which some templates want, from the call that it belongs to.

    Args:
        messages: of the body.
        call_format: of the model's calls; None if it is unknown.
    """
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        calls = message.tool_calls or []
        names.update((call.id, call.function.name) for call in calls)
        one: dict[str, Any] = {"role": message.role, "content": message.text}
        if calls:
            as_text = call_format is not None and call_format.arguments_as_text
            one["tool_calls"] = [call.for_template(arguments_as_text=as_text) for call in calls]
            if call_format is not None and call_format.null_content and not one["content"]:
                one["content"] = None
        thought = message.reasoning_content or message.reasoning
        if thought:
            one.update(dict.fromkeys(NAMES_OF_THOUGHTS, thought))
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            one["name"] = name
        rendered.append(one)
    return rendered
