"""Converts OpenAI's messages to those of chat templates, for every chat API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.earlier_turns import REASONING_KEYS, text_of, turns_for_template
from quire.errors import InvalidRequestError, nearest_name

ROLE_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
MAX_CALLS = 128  # in one message
MAX_NAME_LENGTH = 512  # of a called tool; any text of a model
MAX_ID_LENGTH = 256  # of a call

_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS})
_IGNORED = frozenset({"annotations", "refusal"})


def template_messages(
    messages: Sequence[Mapping[str, Any]], call_format: ToolCallFormat | None
) -> list[dict[str, Any]]:
    """Return a conversation for the model's template, which shows calls in its own way.

    The content of each is a text, a list of text parts, or None. The result of a tool gets the tool's name,
    which some templates want, from the call that it belongs to.

    Args:
        messages: in OpenAI's form. The arguments of a call may be an object, too, its id may be left out,
            and "thinking" is another name of the reasoning, all as in transformers.
        call_format: call format of the model's calls; None if it is unknown.

    Raises:
        InvalidRequestError: there is none, or one is malformed or has more than text.
    """
    if not messages:
        raise _refusal("messages is empty; send at least one")
    names: dict[str, str] = {}
    rendered = [
        _template_message(message, f"messages[{number}]", names, call_format)
        for number, message in enumerate(messages)
    ]
    return turns_for_template(rendered, call_format)


def _template_message(
    message: Mapping[str, Any], path: str, names: dict[str, str], call_format: ToolCallFormat | None
) -> dict[str, Any]:
    """Return one message; note the names of the tools that it calls by the calls' ids."""
    _check_names(message, path)
    role = _text(message, "role", path, pattern=ROLE_PATTERN)
    shown: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, path)}
    given = message.get("tool_calls")
    calls = [] if given is None else _calls(given, path, call_format)
    if calls:
        names.update((call["id"], call["function"]["name"]) for call in calls)
        shown["tool_calls"] = calls
        if call_format is not None and call_format.null_content and not text_of(shown["content"]):
            shown["content"] = None
    reasoning = ""
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            said = _text(message, key, path)
            reasoning = reasoning or said
    if reasoning:
        shown.update(dict.fromkeys(REASONING_KEYS, reasoning))
    name = None
    if message.get("tool_call_id") is not None:
        shown["tool_call_id"] = _text(message, "tool_call_id", path, most=MAX_ID_LENGTH)
        name = names.get(shown["tool_call_id"])
    if message.get("name") is not None:
        name = _text(message, "name", path, most=MAX_NAME_LENGTH)
    if name is not None:
        shown["name"] = name
    return shown


def _check_names(message: Mapping[str, Any], path: str) -> None:
    for name, value in message.items():
        asks_nothing = value is None or (isinstance(value, str | list | dict | bool) and not value)
        if name in _KNOWN or name in _IGNORED or asks_nothing:
            continue
        if name in ("audio", "function_call"):
            hint = "which is not supported; leave it out"
        else:
            hint = f"which is no part of a message; {nearest_name(str(name), _KNOWN)}"
        raise _refusal(f"{path} has {name!r:.80}, {hint}")


def _content(content: Any, role: str, path: str) -> str | list[dict[str, str]] | None:
    if content is None:
        if role != "assistant":
            raise _refusal(f"{path} has no content; only an assistant's message may have none")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _refusal(f"{path}.content is {content!r:.80}; it must be a string or a list of text parts")
    return [_part(part, f"{path}.content[{number}]") for number, part in enumerate(content)]


def _part(part: Any, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        found = f"the type {kind!r:.80}" if isinstance(part, Mapping) else f"the value {part!r:.80}"
        raise _refusal(
            f"{path} has {found}; its type must be text: images, audio, video and files are not supported, "
            "as only the text decoders of multimodal models are served"
        )
    return {"type": "text", "text": _text(part, kind, path)}


def _calls(calls: Any, path: str, call_format: ToolCallFormat | None) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise _refusal(f"{path}.tool_calls must be a list of at most {MAX_CALLS} calls")
    as_text = call_format is not None and call_format.arguments_as_text
    return [
        _call(call, f"{path}.tool_calls[{number}]", f"call{number:05}", as_text)
        for number, call in enumerate(calls)
    ]


def _call(call: Any, path: str, id_: str, as_text: bool) -> dict[str, Any]:
    """Return a call; its arguments are text if the template writes them as they are.

    Other templates get an object; arguments that are none stay text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise _refusal(f"{path} is {call!r:.80}; it must be a call of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = _json(arguments, path) if as_text else arguments
    elif isinstance(arguments, str):
        arguments = arguments if as_text else _object_or_text(arguments)
    else:
        raise _refusal(f"{path}.function.arguments is {arguments!r:.80}; it must be JSON, as a string")
    name = _text(function, "name", f"{path}.function", most=MAX_NAME_LENGTH)
    if call.get("id") is not None:
        id_ = _text(call, "id", path, most=MAX_ID_LENGTH)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object_or_text(arguments: str) -> dict[str, Any] | str:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _json(arguments: Mapping[str, Any], path: str) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"{path}.function.arguments cannot be written as JSON: {error}") from None


def _text(
    fields: Mapping[str, Any], name: str, path: str, *, most: int | None = None, pattern: str = ""
) -> str:
    """Return a field that must be text; with `most`, of one to that many characters."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise _refusal(f"{path}.{name} is {value!r:.80}; it must be a string")
    if most is not None and not 1 <= len(value) <= most:
        raise _refusal(f"{path}.{name} has {len(value)} characters; it must have 1 to {most}")
    if pattern and not re.fullmatch(pattern, value):
        raise _refusal(f"{path}.{name} is {value!r:.80}; it must match {pattern}")
    return value


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
