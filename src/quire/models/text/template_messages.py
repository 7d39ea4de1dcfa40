"""The messages between a `TemplateRenderer` and its processes; nothing here needs jinja2."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import TypedDict

MAX_ANSWER_BYTES = 16 * 2**20  # of a line, a text as JSON
END_OF_TIME = signal.SIGPROF  # ends a process whose computing time is over


class TemplateStart(TypedDict):
    """A renderer process's first message: the template, what to find out, and the limits."""

    source: str
    special_tokens: dict[str, str]
    traces: bool
    cpu_seconds: float
    memory_bytes: int


class Conversation(TypedDict):
    """A conversation to render."""

    messages: list[dict[str, object]]
    add_generation_prompt: bool
    tools: list[dict[str, object]] | None
    variables: dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text that a template has made of a conversation.

    Args:
        text: text of it.
        given: start and end of each run of characters that are not the template's, but the client's.
    """

    text: str
    given: Sequence[tuple[int, int]]

    def part(self, start: int, end: int) -> RenderedChat:
        """Return the part from one character to before another."""
        within = ((max(first, start) - start, min(last, end) - start) for first, last in self.given)
        return RenderedChat(self.text[start:end], [(first, last) for first, last in within if first < last])
