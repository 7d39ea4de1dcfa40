"""What a `TemplateRenderer` and its processes tell each other; nothing here needs jinja2."""

from __future__ import annotations

import signal
from typing import TypedDict

MAX_ANSWER_BYTES = 16 * 2**20  # of a line, a text as JSON
END_OF_TIME = signal.SIGPROF  # ends a process whose computing time is over


class TemplateStart(TypedDict):
    """What a process must know: the template, and how much one conversation may cost."""

    source: str
    special_tokens: dict[str, str]
    cpu_seconds: float
    memory_bytes: int


class Conversation(TypedDict):
    """What is to be rendered."""

    messages: list[dict[str, object]]
    add_generation_prompt: bool
    tools: list[dict[str, object]] | None
    variables: dict[str, object]
