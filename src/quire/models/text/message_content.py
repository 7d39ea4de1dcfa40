"""The content of messages, a text or a list of parts, in the form that a chat template shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
    """

    texts: frozenset[str]
    parts: frozenset[str]
    thinking: bool = False

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose content has a form that is shown: the one that it has, if possible."""
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
    return forms


def _shows_all(text: str | None) -> bool:
    return text is not None and _FIRST in text and _SECOND in text and _NOTE not in text


def _probe(role: str, content: Content, forms: ContentForms) -> Messages:
    """Return a conversation in which a message of the role has the content."""
    user = forms.apply({"role": "user", "content": _HELLO})
    said = {"role": role, "content": content}
    if role == "user":
        return [said]
    if role == "system":
        return [said, user]
    if role == "assistant":
        return [user, said, user]
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    return [user, forms.apply(call), {**said, "name": "f", "tool_call_id": _CALL["id"]}]
