"""Incremental text, read as if it were complete.

A reader is a generator that yields where it needs more text, and continues once there is more or the text
has ended. Every method consumes what it returns. All of it takes time linear in the text, however it is
split: between two pieces, no more is kept than the longest marker.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

SPACE = re.compile(r"\s+")

UNBOUNDED = 1 << 60
"""More characters than any text has."""


class IncomingText:
    """A text that may continue.

    Attributes:
        is_cut_off: whether it has ended although its writer had not.
        has_run_out: whether the text ended where a marker that was looked for may have begun.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self.is_cut_off = False
        self.has_run_out = False
        self._kept: list[str] = []

    def add(self, text: str) -> None:
        """Append the next piece."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, *, is_cut_off: bool = False) -> None:
        """Declare that no more will come.

        Args:
            is_cut_off: whether its writer had not ended it.
        """
        self._has_ended = True
        self.is_cut_off = is_cut_off

    def mark(self) -> None:
        """Forget what has been consumed so far; `since_mark` returns what is consumed from now on."""
        self._kept.clear()

    def since_mark(self) -> str:
        """Return the text consumed since `mark`."""
        return "".join(self._kept)

    def unread(self, text: str) -> None:
        """Take back what the last call has returned, or its end, before more text is added."""
        self._position -= len(text)
        self._kept[-1] = self._kept[-1].removesuffix(text)

    def peek(self) -> Reading[str]:
        """Return the next character without consuming it; "" at the end."""
        while self._position == len(self._text):
            if self._has_ended:
                self.has_run_out = True
                return ""
            yield
        return self._text[self._position]

    def run(self, pattern: re.Pattern[str], max_length: int = UNBOUNDED) -> str:
        """Return what is there already of a run of characters; `pattern` matches any part of such a run."""
        match = pattern.match(self._text, self._position, self._position + max_length)
        return self._consume(match.end()) if match else ""

    def whole_run(self, pattern: re.Pattern[str], max_length: int = UNBOUNDED) -> Reading[str]:
        """Return a run of characters up to where it ends; of a longer one, `max_length` + 1 characters."""
        parts: list[str] = []
        left = max_length + 1
        while left and (yield from self.peek()) and (part := self.run(pattern, left)):
            parts.append(part)
            left -= len(part)
        return "".join(parts)

    def skip_space(self) -> Reading[None]:
        """Consume white space."""
        yield from self.whole_run(SPACE)

    def match(self, *literals: str) -> Reading[str]:
        """Return the longest of `literals` that comes next; "", and nothing is consumed, if none does."""
        for literal in sorted(literals, key=len, reverse=True):
            if (yield from self._comes_next(literal)):
                return self._consume(self._position + len(literal))
        return ""

    def piece(self) -> Reading[str]:
        """Return the next piece of the text, however long; "" at the end."""
        yield from self.peek()
        return self._consume(len(self._text))

    def piece_before(self, markers: Sequence[str]) -> Reading[tuple[str, str]]:
        """Return a piece of the text before the first of `markers`, and the marker once it has come.

        The marker is "" while more text may come before it; piece and marker are both "" at the end. Of
        markers that begin alike, the longer one must come first.
        """
        pattern = _alternatives(tuple(markers))
        while True:
            found = pattern.search(self._text, self._position)
            if found:
                before = self._consume(found.start())
                return before, self._consume(found.end())
            end = len(self._text) if self._has_ended else len(self._text) - self._marker_prefix(markers)
            if end > self._position or self._has_ended:
                self.has_run_out |= end == self._position
                return self._consume(end), ""
            yield

    def _comes_next(self, literal: str) -> Reading[bool]:
        while len(self._text) - self._position < len(literal):
            may_follow = literal.startswith(self._text[self._position :])
            if self._has_ended or not may_follow:
                self.has_run_out |= may_follow
                return False
            yield
        return self._text.startswith(literal, self._position)

    def _marker_prefix(self, markers: Sequence[str]) -> int:
        """Return how many characters at the end of the text may be the beginning of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._text) - self._position)
        for length in range(longest, 0, -1):
            end = self._text[-length:]
            if any(marker.startswith(end) for marker in markers):
                return length
        return 0

    def _consume(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        self._kept.append(text)
        return text


@functools.lru_cache(maxsize=256)
def _alternatives(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
