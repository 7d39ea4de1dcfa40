"""Earlier turns of the model as chat templates take them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from quire.dialogue.calls.tool_call_format import ToolCallFormat

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # in templates


def text_of(content: str | Sequence[Mapping[str, str]] | None) -> str:
    """Return the text of a message: its parts joined by line breaks, "" if it has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def turns_for_template(
    messages: list[dict[str, Any]], call_format: ToolCallFormat | None
) -> list[dict[str, Any]]:
    """Return a conversation, in which the model calls as many tools in a turn as its template has place for.

    Where that is one, each call of a turn is followed by its own results, and what the model said before it
    is the end of its reasoning: templates refuse a call with both. If the template wants that, ids of calls
    are numbered.

    Args:
        messages: messages of the conversation.
        call_format: call format of the model's calls; None if it is unknown.
    """
    if call_format is not None and call_format.numbered_ids:
        return _with_numbered_ids(messages)
    if call_format is None or not call_format.one_call_a_turn:
        return messages
    turns: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if not message.get("tool_calls"):
            turns.append(message)
            continue
        first_result = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        turns += _turns_of_one_call(message, messages[first_result:at])
    return turns


def _with_numbered_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which the id of each call is its tool and its number."""
    numbers = itertools.count()
    numbered: dict[Any, str] = {}  # by the id that it had
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = dict(message)
        for call in message.get("tool_calls", ()):
            numbered[call["id"]] = f"functions.{call['function']['name']}:{next(numbers)}"
        if message.get("tool_calls"):
            turn["tool_calls"] = [{**call, "id": numbered[call["id"]]} for call in message["tool_calls"]]
        if message.get("tool_call_id") in numbered:
            turn["tool_call_id"] = numbered[message["tool_call_id"]]
        turns.append(turn)
    return turns


def _turns_of_one_call(message: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message of the model's and the results of its calls, each call with its own results."""
    calls = message["tool_calls"]
    results_by_call: dict[Any, list[dict[str, Any]]] = {call["id"]: [] for call in calls}
    last_call = calls[-1]["id"]
    for result in results:
        results_by_call.get(result.get("tool_call_id"), results_by_call[last_call]).append(result)
    turns: list[dict[str, Any]] = []
    turn = _with_one_text(message)
    for call in calls:
        turns += [{**turn, "tool_calls": [call]}, *results_by_call.pop(call["id"], [])]
        turn = {"role": message["role"], "content": ""}
    return turns


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the content follows the reasoning, if there are both."""
    given = {name: message[name] for name in REASONING_KEYS if message.get(name)}
    said = text_of(message["content"])
    if not given or not said:
        return message
    joined = {name: f"{reasoning}\n\n{said}" for name, reasoning in given.items()}
    return {**message, **joined, "content": ""}
