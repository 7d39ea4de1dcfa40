"""`ChatHistory`: a conversation under OpenVINO GenAI's names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from quire.front.arguments import require_chat


class ChatHistory:
    """A conversation, with tools and variables for the chat template.

    Messages, tools and context are copied on their way in and out.

    Args:
        messages: the first ones, each with `role` and `content`.

    Raises:
        InvalidRequestError: a message is no dictionary.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._extra_context: dict[str, Any] = {}
        self.set_messages(messages)

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"ChatHistory({self._messages})"

    def append(self, message: Mapping[str, Any]) -> None:
        """Add a message at the end.

        Raises:
            InvalidRequestError: it is no dictionary.
        """
        require_chat([message], None, {})
        self._messages.append(dict(copy.deepcopy(message)))

    def pop(self) -> dict[str, Any]:
        """Remove the last message, and return it.

        Raises:
            IndexError: there is none.
        """
        return self._messages.pop()

    def clear(self) -> None:
        """Remove all messages; tools and context stay."""
        self._messages.clear()

    def get_messages(self) -> list[dict[str, Any]]:
        """Return a copy of the messages."""
        return copy.deepcopy(self._messages)

    def set_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the messages.

        Raises:
            InvalidRequestError: one is no dictionary.
        """
        require_chat(messages, None, {})
        self._messages = [dict(message) for message in copy.deepcopy(messages)]

    def get_tools(self) -> list[dict[str, Any]]:
        """Return a copy of the tools."""
        return copy.deepcopy(self._tools)

    def set_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Replace the tools that the model may call, as OpenAI's API describes them.

        Raises:
            InvalidRequestError: one is no dictionary.
        """
        require_chat((), tools, {})
        self._tools = [dict(tool) for tool in copy.deepcopy(tools)]

    def get_extra_context(self) -> dict[str, Any]:
        """Return a copy of the variables for the chat template."""
        return copy.deepcopy(self._extra_context)

    def set_extra_context(self, extra_context: Mapping[str, Any]) -> None:
        """Replace the variables for the chat template, such as enable_thinking.

        Raises:
            InvalidRequestError: it is no dictionary.
        """
        require_chat((), None, extra_context)
        self._extra_context = dict(copy.deepcopy(extra_context))
