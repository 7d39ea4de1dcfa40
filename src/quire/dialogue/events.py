"""Events of an answer, piece by piece; protocols translate them into their own."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; the calls of an answer count from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: JSON text, an object once it is complete."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends.

    Args:
        index: index of the call.
        is_complete: whether its arguments are an object. If not, it is no call: the answer was cut off, or it
            is malformed, and its text follows as content.
    """

    index: int
    is_complete: bool


AnswerEvent: TypeAlias = ContentDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd
