"""Messages of /api/chat, and their conversion to OpenAI's form."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quire.dialogue.messages import MAX_CALLS
from quire.server.calls.tool_fields import CalledName, CallId
from quire.server.openai.chat_messages import Role
from quire.server.wire.strict_model import Ignored, JsonObject, StrictModel, Unsupported


def _refuse_images(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("images", "models are served with text only; leave images out")


NoImages = Annotated[Unsupported, BeforeValidator(_refuse_images)]


class CalledOllamaFunction(StrictModel):
    """A function that the model has called."""

    path_prefix = "messages[].tool_calls[].function."

    name: CalledName
    arguments: JsonObject | None = None
    description: Ignored = None
    index: Ignored = None


class OllamaMessageCall(StrictModel):
    """A call in an assistant's message."""

    path_prefix = "messages[].tool_calls[]."

    function: CalledOllamaFunction
    id: CallId | None = None
    type: Ignored = None


Calls = Annotated[list[OllamaMessageCall], Field(fail_fast=True, max_length=MAX_CALLS)]


class OllamaMessage(StrictModel):
    """One message; the chat template decides which roles and orders are valid."""

    path_prefix = "messages[]."

    role: Role
    content: str | None = Field(None, description="The text. Default: none.")
    thinking: str | None = Field(None, description="The assistant's reasoning, for templates that show it.")
    tool_calls: Calls | None = Field(None, description="The tools that the assistant called.")
    tool_name: CalledName | None = Field(None, description="In a tool's message: the tool that returned it.")
    name: CalledName | None = Field(None, description="The older name of tool_name.")
    tool_call_id: CallId | None = Field(None, description="In a tool's message: the call that it answers.")
    images: NoImages = None


class _OpenCalls:
    """Calls without a result yet; results without an id are matched in order."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()  # by id
        self._ids: defaultdict[str, deque[str]] = defaultdict(deque)  # by name, including calls with an id
        self._num_calls = 0

    def add(self, call: OllamaMessageCall) -> str:
        """Return the id of a call, generated (nine letters and digits) if the client sent none."""
        self._num_calls += 1
        call_id = call.id or f"call{self._num_calls:05}"
        self._names[call_id] = call.function.name
        self._ids[call.function.name].append(call_id)
        return call_id

    def take(self, message: OllamaMessage) -> tuple[str | None, str | None]:
        """Return id and name of the call that a tool's message answers; None where unknown."""
        name = message.tool_name or message.name
        if message.tool_call_id is not None:
            return message.tool_call_id, self._names.pop(message.tool_call_id, name)
        if name is None:
            return self._names.popitem(last=False) if self._names else (None, None)
        ids = self._ids[name]
        while ids:
            if self._names.pop(call_id := ids.popleft(), None) is not None:
                return call_id, name
        return None, name


def openai_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form.

    Args:
        messages: the body's messages.
    """
    calls = _OpenCalls()
    given = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = [_openai_call(call, calls.add(call)) for call in message.tool_calls]
        call_id, name = calls.take(message) if message.role == "tool" else (None, message.name)
        if call_id is not None:
            one["tool_call_id"] = call_id
        if name is not None:
            one["name"] = name
        given.append(one)
    return given


def _openai_call(call: OllamaMessageCall, call_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call_id, "type": "function", "function": function}
