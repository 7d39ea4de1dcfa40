"""What other servers' clients send: names without effect, which are accepted and reported, and typos."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from urllib.parse import quote

from quire.errors import nearest_name

log = logging.getLogger(__name__)

HEADER = "X-Ignored-Parameters"
MAX_IGNORED_NAMES = 64
"""Different names without effect that a body may have."""

MAX_LOGGED_NAMES = 256
"""Different names that one server logs; others are only in the header."""

_MAX_HEADER_LENGTH = 512  # characters
_MAX_NAME_LENGTH = 64  # characters, as shown
_MAX_SHORT_NAME = 5  # characters; up to here, two edits make another word
_LONGEST_TYPO = 40  # characters
_NOT_A_LETTER = re.compile(r"[^a-z0-9]")
_OTHER_SERVERS_NAMES = frozenset({"models", "top_a", "top_n"})  # that are no typos of Quire's


class Ignorable:
    """Marks a field that changes no token: any value is accepted, unless the server is strict."""


class Leniency:
    """How strictly one body is read, and its fields without effect.

    Args:
        is_strict: whether whatever has no effect is refused.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> list[str]:
        """Paths of what had no effect, each once, in printable ASCII and shortened."""
        return list(self._ignored)

    def ignore(self, path: str) -> bool:
        """Note that a field has no effect; return whether that is possible: there are not too many yet."""
        self._ignored[_shown(path)] = None
        return len(self._ignored) <= MAX_IGNORED_NAMES

    def header(self) -> str:
        """Return the value of `HEADER`: the names, and how many more there are; empty if there are none."""
        shown: list[str] = []
        for name in self._ignored:
            if sum(map(len, shown)) + 2 * len(shown) + len(name) > _MAX_HEADER_LENGTH:
                return f"{', '.join(shown)}, +{len(self._ignored) - len(shown)}"
            shown.append(name)
        return ", ".join(shown)


class IgnoredNames:
    """The log's part of it: each name is logged once, and no more than `MAX_LOGGED_NAMES`."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log new names."""
        new = [name for name in names if name not in self._logged][: MAX_LOGGED_NAMES - len(self._logged)]
        if new:
            self._logged.update(new)
            log.warning("requests have parameters without effect: %s; %s names them", ", ".join(new), HEADER)


def _shown(path: str) -> str:
    text = quote(path[: _MAX_NAME_LENGTH + 1], safe="[]", errors="replace")
    return text if len(text) <= _MAX_NAME_LENGTH else text[:_MAX_NAME_LENGTH] + "~"


def typo_hint(name: str, known: frozenset[str]) -> str | None:
    """Return which known name is meant by an unknown one, as the tail of an error; None if it is no typo."""
    if len(name) > _LONGEST_TYPO or name in _OTHER_SERVERS_NAMES:
        return None
    return _hint(name, known)


@functools.lru_cache(maxsize=1024)
def _hint(name: str, known: frozenset[str]) -> str | None:
    letters = _letters(name)
    close = [one for one, own_letters in _letters_of(known) if _looks_like(letters, own_letters)]
    return nearest_name(name, close) if close else None


@functools.cache
def _letters_of(known: frozenset[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _letters(name)) for name in known)


def _letters(name: str) -> str:
    """Return a name without what differs between maxTokens, max-tokens and max_tokens."""
    return _NOT_A_LETTER.sub("", name.casefold())


def _looks_like(name: str, known: str) -> bool:
    most = 0 if len(known) <= 2 else 1 if len(known) <= _MAX_SHORT_NAME else 2
    if abs(len(name) - len(known)) > most or len(set(name) ^ set(known)) > 2 * most:
        return False  # an edit changes at most two letters of the set
    return is_within_edits(name, known, most)


def is_within_edits(first: str, second: str, most: int) -> bool:
    """Return whether few characters must be inserted, removed, replaced or swapped with the next.

    Optimal string alignment, the restricted form of the distance of Damerau (1964).

    Args:
        first, second: texts.
        most: edits that are few.
    """
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        following = [i]
        for j, b in enumerate(second, 1):
            cost = min(row[j] + 1, following[-1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        before, row = row, following
        if min(before) >= most < min(row):
            return False  # no row can have less
    return row[-1] <= most
