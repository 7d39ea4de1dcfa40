"""Text that tracks which of its characters came from a client, through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

_OWN, _GIVEN = b"\0", b"\1"
_RUN = re.compile(_GIVEN + b"+")
_PLAIN_VALUES = (str, int, float, bool, type(None))


class TracedText(str):
    """Text that knows for each character whether a client has given it.

    It is equal to the plain text, has its hash, and does what that does. Operations that make new text keep
    the marks of the characters; where that is impossible, all of the new text counts as given. Text that is
    exactly `str` is not given, and of any other class all of it is.

    Args:
        text: text of it.
        given: a byte for each character, 1 if it is given and 0 if not.
    """

    __slots__ = ("_given",)
    _given: bytes

    def __new__(cls, text: str, given: bytes) -> TracedText:
        """Return a text with the marks of its characters."""
        self = str.__new__(cls, text)
        self._given = given
        return self

    def __str__(self) -> TracedText:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        marks = self._given[key] if type(key) is slice else bytes((self._given[key],))
        return TracedText(str.__getitem__(self, key), marks)

    def __iter__(self) -> Iterator[TracedText]:
        return (self[at] for at in range(len(self)))

    def __add__(self, other: str) -> TracedText:
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(str.__add__(self, other), self._given + _marks(other))

    def __radd__(self, other: str) -> TracedText:
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(str.__add__(other, self), _marks(other) + self._given)

    def __mul__(self, count: SupportsIndex) -> TracedText:
        return TracedText(super().__mul__(count), self._given * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> TracedText:
        if isinstance(values, tuple):
            return self._filled_in(super().__mod__, values)
        return self._filled_in(lambda several: str.__mod__(self, several[0]), (values,))

    def join(self, items: Iterable[str]) -> TracedText:
        """As of `str`."""
        pieces = [piece for item in items for piece in (self, item)]
        return traced(joined(pieces[1:]))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:  # type: ignore[override]
        """As of `str`."""
        return self._found(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:  # type: ignore[override]
        """As of `str`."""
        return self._found(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[TracedText]:  # type: ignore[override]
        """As of `str`."""
        return self._found(super().splitlines(keepends), 0)

    def partition(self, sep: str) -> tuple[TracedText, TracedText, TracedText]:
        """As of `str`."""
        head, middle, tail = self._found(list(super().partition(sep)), 0)
        return head, middle, tail

    def rpartition(self, sep: str) -> tuple[TracedText, TracedText, TracedText]:
        """As of `str`."""
        head, middle, tail = self._found(list(super().rpartition(sep)), 0)
        return head, middle, tail

    def strip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        start = len(self) - len(str.lstrip(self, chars))
        return self[start : start + len(str.strip(self, chars))]

    def lstrip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        """As of `str`."""
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> TracedText:
        """As of `str`."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> TracedText:
        """As of `str`."""
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TracedText:
        """As of `str`."""
        if not old:
            return given_text(super().replace(old, new, count))
        return traced(new).join(self.split(old, count))

    def lower(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().lower())

    def upper(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().upper())

    def capitalize(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().capitalize())

    def title(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().title())

    def swapcase(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().swapcase())

    def casefold(self) -> TracedText:
        """As of `str`."""
        return self._with_case(super().casefold())

    def _with_case(self, text: str) -> TracedText:
        """Return the text in another case, in which no character can have become less than one."""
        return TracedText(text, self._given) if len(text) == len(self) else given_text(text)

    def _found(self, pieces: list[str], gap: int) -> list[TracedText]:
        """Return pieces that are in this text in order, with `gap` characters or white space between."""
        found, at = [], 0
        for piece in pieces:
            at = self.find(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + gap
        return found

    def _filled_in(self, fill_in: Callable[[tuple[Any, ...]], str], values: tuple[Any, ...]) -> TracedText:
        """Return this text with values in its fields, traced by placeholders that cannot be guessed."""
        filled = fill_in(values)
        if _GIVEN in self._given or any(not isinstance(value, _PLAIN_VALUES) for value in values):
            return given_text(filled)
        texts: dict[str, str] = {}
        shown: list[Any] = []
        for value in values:
            stand_in = value
            if isinstance(value, str) and type(value) is not str:
                texts[stand_in := secrets.token_hex(16)] = value
            shown.append(stand_in)
        marked = fill_in(tuple(shown))
        pieces = re.split(f"({'|'.join(texts)})", marked) if texts else [marked]
        found = joined(texts.get(piece, piece) for piece in pieces)
        return traced(found) if found == filled else given_text(filled)


def formatted(
    text: str, fill_in: Callable[..., str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TracedText:
    """Return a text with its fields filled in by its `str.format`; given if a value is more than text."""

    def fill(values: tuple[Any, ...]) -> str:
        return fill_in(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    return traced(text)._filled_in(fill, (*args, *kwargs.values()))


def given_runs(text: str) -> list[tuple[int, int]]:
    """Return where the given characters of a text are: start and end of each run of them."""
    return [run.span() for run in _RUN.finditer(_marks(text))]


def traced(text: str) -> TracedText:
    """Return a text as a `TracedText`."""
    return text if isinstance(text, TracedText) else TracedText(text, _marks(text))


def given_text(text: str) -> TracedText:
    """Return a text given as a whole."""
    return TracedText(text, _GIVEN * len(text))


def joined(pieces: Iterable[str]) -> str:
    """Return pieces of text as one, which is traced if one of them is."""
    pieces = list(pieces)
    if all(type(piece) is str for piece in pieces):
        return "".join(pieces)
    return TracedText("".join(pieces), b"".join(map(_marks, pieces)))


def given_value(value: Any) -> Any:
    """Return a value of JSON in which all texts are given, keys, too."""
    if isinstance(value, str):
        return given_text(value)
    if isinstance(value, dict):
        return {given_text(key): given_value(one) for key, one in value.items()}
    return [given_value(one) for one in value] if isinstance(value, list) else value


def _marks(text: str) -> bytes:
    if isinstance(text, TracedText):
        return text._given
    return (_OWN if type(text) is str else _GIVEN) * len(text)
