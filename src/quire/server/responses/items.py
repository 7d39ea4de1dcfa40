"""Items of a Responses conversation, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from quire.dialogue.earlier_turns import text_of
from quire.server.calls.tool_fields import CalledName, CallId
from quire.server.wire.strict_model import Ignored, StrictModel, text_or_list

_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "refusal"})


class TextPart(StrictModel):
    """Text of a message."""

    path_prefix = "input[].content[]."

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class RefusalPart(StrictModel):
    """The text of a refusal."""

    path_prefix = "input[].content[]."

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


def _part_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _TEXT_TYPES:
        return None
    return "=refusal" if kind == "refusal" else "=text_part"


Parts = Annotated[
    list[
        Annotated[
            Annotated[TextPart, Tag("=text_part")] | Annotated[RefusalPart, Tag("=refusal")],
            Discriminator(
                _part_form,
                custom_error_type="form",
                custom_error_message="its type must be input_text or output_text; "
                "images, audio and files are not taken",
            ),
        ]
    ],
    Field(fail_fast=True),
]
Content = Annotated[
    Annotated[str, Tag("=text")] | Annotated[Parts, Tag("=parts")],
    text_or_list("=parts", "a string or a list of text parts"),
]


class MessageItem(StrictModel):
    """A message."""

    path_prefix = "input[]."

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(StrictModel):
    """A tool that the model called."""

    path_prefix = "input[]."

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: str = Field(description="JSON, as the model wrote it.")
    id: Ignored = None
    status: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class FunctionCallOutputItem(StrictModel):
    """The result of a tool that the model called."""

    path_prefix = "input[]."

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content
    name: Ignored = None
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None


class ReasoningText(StrictModel):
    """Reasoning, or a summary of it."""

    path_prefix = "input[].content[]."

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning before a message or a call."""

    path_prefix = "input[]."

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary if it has no content."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(StrictModel):
    """A reference to an item of a stored response."""

    path_prefix = "input[]."

    type: Literal["item_reference"]
    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]


_ITEM_TAGS = {
    "message": "=message",
    "function_call": "=call",
    "function_call_output": "=output",
    "reasoning": "=reasoning",
    "item_reference": "=reference",
}


def _item_form(value: Any) -> str | None:
    kind = value.get("type") or "message" if isinstance(value, dict) else None
    return _ITEM_TAGS.get(kind) if isinstance(kind, str) else None


GivenItem = (
    Annotated[MessageItem, Tag("=message")]
    | Annotated[FunctionCallItem, Tag("=call")]
    | Annotated[FunctionCallOutputItem, Tag("=output")]
    | Annotated[ReasoningItem, Tag("=reasoning")]
    | Annotated[ItemReference, Tag("=reference")]
)
Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Items = Annotated[
    list[
        Annotated[
            GivenItem,
            Discriminator(
                _item_form,
                custom_error_type="form",
                custom_error_message="its type must be message, function_call, function_call_output or "
                "reasoning; tools that run on the server are not there",
            ),
        ]
    ],
    Field(fail_fast=True, min_length=1),
]


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form of messages.

    Consecutive reasoning, text and calls of the model are merged into one message, and so are instructions
    and leading system messages.

    Args:
        instructions: the system prompt.
        items: items of the conversation.
    """
    turns = _Turns()
    if instructions:
        turns.say("system", instructions)
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turns.answer(_content_of(item.content))
            case MessageItem():
                turns.say("system" if item.role == "developer" else item.role, _content_of(item.content))
            case ReasoningItem():
                turns.think(item.text)
            case FunctionCallItem():
                turns.call(item)
            case FunctionCallOutputItem():
                turns.result(item.call_id, _content_of(item.output))
    return turns.messages


_Text = str | list[dict[str, str]]


def _content_of(content: str | list[TextPart | RefusalPart]) -> _Text:
    """Return the content of a message; "" if it has no parts."""
    return content if isinstance(content, str) else [_part(part.text) for part in content] or ""


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class _Turns:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, content: _Text) -> None:
        """Add a user or system message."""
        only_system = all(message["role"] == "system" for message in self.messages)
        if role == "system" and self.messages and only_system:
            self.messages[-1]["content"] = f"{text_of(self.messages[-1]['content'])}\n\n{text_of(content)}"
        else:
            self.messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        """Start an assistant message with reasoning."""
        self._begin()["reasoning_content"] = text

    def answer(self, content: _Text) -> None:
        """Add text to the assistant message, or start another if it already has text."""
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            turn = self._begin()
        turn["content"] = content

    def call(self, item: FunctionCallItem) -> None:
        """Add a call to the assistant message."""
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self) -> dict[str, Any]:
        """Return the current assistant message, started if necessary."""
        is_open = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return self.messages[-1] if is_open else self._begin()

    def _begin(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def result(self, call_id: str, content: _Text) -> None:
        """Add a tool's result."""
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
