"""Messages of a body as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.dialogue.formats import ToolCallFormat
from quire.server.protocol import ChatMessage


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
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            one["name"] = name
        rendered.append(one)
    return rendered
