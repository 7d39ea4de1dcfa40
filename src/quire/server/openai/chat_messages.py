"""Messages in bodies of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from quire.dialogue.messages import MAX_CALLS, ROLE_PATTERN
from quire.server.calls.tool_fields import CalledName, CallId, MessageToolCall
from quire.server.wire.strict_model import Ignored, StrictModel, Unsupported, text_or_list

Role = Annotated[str, StringConstraints(pattern=ROLE_PATTERN)]


class TextPart(StrictModel):
    """A part of a message's content."""

    path_prefix = "messages[].content[]."

    type: Literal["text"]
    text: str


class RefusalPart(StrictModel):
    """The text of a refusal."""

    path_prefix = "messages[].content[]."

    type: Literal["refusal"]
    refusal: str


def _part_form(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "=refusal" if kind == "refusal" else "=text_part"


Part = Annotated[
    Annotated[TextPart, Tag("=text_part")] | Annotated[RefusalPart, Tag("=refusal")],
    Discriminator(_part_form),
]
Content = Annotated[
    Annotated[str, Tag("=text")] | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag("=parts")],
    text_or_list("=parts", "a string or a list of text parts"),
]


class ChatMessage(StrictModel):
    """One message; the chat template decides which roles and orders are valid."""

    path_prefix = "messages[]."

    role: Role
    content: Content | None = Field(
        None, validate_default=True, description="Required, except in an assistant's message."
    )
    name: CalledName | None = Field(
        None, description="Name of the speaker or the tool, for templates that show it."
    )
    tool_call_id: CallId | None = Field(None, description="In a tool's message: the call that it answers.")
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = Field(
        None, description="The tools that the assistant called."
    )
    reasoning_content: str | None = Field(
        None, description="The assistant's reasoning, for templates that show it."
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

    def as_given(self) -> dict[str, Any]:
        """Return the message in OpenAI's form, without fields that have no effect."""
        return self.model_dump(exclude_none=True)
