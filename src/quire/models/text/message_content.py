"""The content of messages, a text or a list of parts, in the form that a chat template shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Content = str | list[dict[str, str]] | None
Messages = list[dict[str, Any]]

_FIRST, _SECOND = "quire-first-part", "quire-second-part"
_NOTE = "quire-no-text"  # of a part; shown by templates that print parts as Python or JSON has them
_HELLO = "Hello"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}


def joined_parts(content: Content) -> str | None:
    """Return the text of a message, its parts joined by line breaks."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def with_ending(content: Content, ending: str) -> Content:
    """Return a content whose text goes on with `ending`."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + ending}]
    return f"{content or ''}{ending}"


@dataclasses.dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms in which a template shows the content of messages.

    Args:
        texts: roles of whose messages it shows a text.
        parts: roles of whose messages it shows the text of all parts.
        thinking: whether it shows reasoning that is a part of the model's content, as Mistral's templates do.
        responses: whether it shows results of calls that are a part of the message with the calls, as Gemma
            4's templates do, of which the first show no others as the model knows them.
    """

    texts: frozenset[str]
    parts: frozenset[str]
    thinking: bool = False
    responses: bool = False

    def apply(self, messages: Iterable[Mapping[str, Any]]) -> Messages:
        """Return messages whose contents have a form that is shown: the one that they have, if possible."""
        shown: Messages = []
        for message in messages:
            if self.responses and message.get("role") == "tool" and shown and shown[-1].get("tool_calls"):
                response = {"response": joined_parts(message.get("content"))}
                name = {key: message[key] for key in ("name",) if key in message}
                shown[-1].setdefault("tool_responses", []).append({**name, **response})
            else:
                shown.append(self._applied(message))
        return shown

    def _applied(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content, role = message.get("content"), message.get("role")
        if self.thinking and role == "assistant" and message.get("thinking"):
            said = content if isinstance(content, list) else [{"type": "text", "text": content}]
            reasoning = {"type": "thinking", "thinking": message["thinking"]}
            return {**message, "content": [reasoning, *said] if content else [reasoning]}
        if role not in self.texts | self.parts:
            role = "user"
        if isinstance(content, list):
            is_shown = role in self.parts
            return dict(message) if is_shown else {**message, "content": joined_parts(content)}
        if role in self.texts or role not in self.parts:
            return dict(message)
        parts = [] if content is None else [{"type": "text", "text": content}]
        return {**message, "content": parts}


def forms_of(render: Callable[[Messages], str | None]) -> ContentForms:
    """Find out which forms a template shows by rendering small conversations with either.

    That is the template's own answer, however it reads content: in loops, macros, or copies of the messages.

    Args:
        render: returns the text of a conversation; None: the template refuses it.
    """
    forms = ContentForms(frozenset(), frozenset())
    for role in ("user", "system", "assistant", "tool"):
        text = render(_probe(role, f"{_FIRST} {_SECOND}", forms))
        if _shows_all(text):
            forms = dataclasses.replace(forms, texts=forms.texts | {role})
        parts = [{"type": "text", "text": text, "note": _NOTE} for text in (_FIRST, _SECOND)]
        text = render(_probe(role, parts, forms))
        if _shows_all(text):
            forms = dataclasses.replace(forms, parts=forms.parts | {role})
    if "assistant" in forms.parts:
        thinking = {"type": "thinking", "thinking": _FIRST, "note": _NOTE}
        said = {"type": "text", "text": _SECOND, "note": _NOTE}
        text = render(_probe("assistant", [thinking, said], forms))
        forms = dataclasses.replace(forms, thinking=_shows_all(text))
    response = {"name": "f", "response": f"{_FIRST} {_SECOND}", "note": _NOTE}
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL], "tool_responses": [response]}
    text = render(forms.apply([{"role": "user", "content": _HELLO}, call]))
    return dataclasses.replace(forms, responses=_shows_all(text))


def _shows_all(text: str | None) -> bool:
    return text is not None and _FIRST in text and _SECOND in text and _NOTE not in text


def _probe(role: str, content: Content, forms: ContentForms) -> Messages:
    """Return a conversation in which a message of the role has the content."""
    user = {"role": "user", "content": _HELLO}
    said = {"role": role, "content": content}
    if role == "user":
        return [said]
    [user] = forms.apply([user])
    if role == "system":
        return [said, user]
    if role == "assistant":
        return [user, said, user]
    [call] = forms.apply([{"role": "assistant", "content": "", "tool_calls": [_CALL]}])
    return [user, call, {**said, "name": "f", "tool_call_id": _CALL["id"]}]
