"""The process that renders chat templates: `python -m quire.models.text.template_process`.

Its parent is a `TemplateRenderer`. Standard input has a `TemplateStart` and
then conversations, one JSON document on each line. Standard output has a list for each: the text, its given
runs as in `RenderedChat`, and the error. A conversation that takes too much time ends the process, and so may
one that takes too much memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

from quire.errors import InvalidRequestError
from quire.memory_limit import limit_memory
from quire.models.text.chat_template import ChatTemplate
from quire.models.text.template_messages import MAX_ANSWER_BYTES, Conversation, RenderedChat, TemplateStart


def main() -> None:
    """Render what standard input asks for, until it closes."""
    try:
        _answer_all()
    except ConnectionError:  # the parent has ended, and did not read all answers
        os._exit(0)


def _answer_all() -> None:
    first = sys.stdin.buffer.readline()
    if not first:
        return  # the parent has ended while this process started
    start: TemplateStart = json.loads(first)
    limit_memory(start["memory_bytes"])
    templates: list[ChatTemplate] = []

    def compile_template() -> RenderedChat:
        templates.append(ChatTemplate(start["source"], start["special_tokens"]))
        return RenderedChat("", ())

    _answer(compile_template, start)
    while line := sys.stdin.buffer.readline():
        _answer(lambda line=line: _rendered(templates[0], line, start), start)  # type: ignore[misc]


def _rendered(template: ChatTemplate, line: bytes, start: TemplateStart) -> RenderedChat:
    conversation: Conversation = json.loads(line)
    return template.render(
        conversation["messages"],
        add_generation_prompt=conversation["add_generation_prompt"],
        tools=conversation["tools"],
        variables=conversation["variables"],
        traces=start["traces"],
    )


def _answer(call: Callable[[], RenderedChat], start: TemplateStart) -> None:
    """Write what a call returns or what is wrong, unless it takes too much; end if it took all memory."""
    signal.setitimer(signal.ITIMER_PROF, start["cpu_seconds"])
    try:
        rendered = call()
        answer = json.dumps([rendered.text, rendered.given, None]).encode()
        if len(answer) >= MAX_ANSWER_BYTES:
            too_long = f"its text has {len(answer)} bytes as JSON; the limit is {MAX_ANSWER_BYTES}"
            answer = json.dumps(["", (), f"the model's chat template cannot be used: {too_long}"]).encode()
    except InvalidRequestError as error:
        answer = json.dumps(["", (), str(error)[:1000]]).encode()
    except MemoryError:
        os._exit(1)  # the parent knows what that means
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
