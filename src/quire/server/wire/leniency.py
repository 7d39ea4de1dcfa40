"""Fields of other servers' clients: ignored names, which are reported, and typos."""

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
"""Maximum number of ignored names per body."""

MAX_LOGGED_NAMES = 256
"""Maximum number of names that a server logs; more are only in the header."""

_MAX_HEADER_LENGTH = 512  # characters
_MAX_NAME_LENGTH = 64  # characters, as shown
_MAX_SHORT_NAME = 5  # characters; up to this length, two edits make another word
_MAX_TYPO_LENGTH = 40  # characters
_NOT_A_LETTER = re.compile(r"[^a-z0-9]")
_OTHER_SERVERS_NAMES = frozenset({"models", "top_a", "top_n"})  # not typos of Quire's names


class Ignorable:
    """Marks a field that does not affect tokens; any value is accepted, unless the server is strict."""


class Leniency:
    """How strictly one body is read, and its ignored fields.

    Args:
        is_strict: whether fields without effect are refused.
    """

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> list[str]:
        """Unique paths of ignored fields, in printable ASCII and shortened."""
        return list(self._ignored)

    def ignore(self, path: str) -> bool:
        """Report a field as ignored; return False if there are too many already."""
        self._ignored[_shown(path)] = None
        return len(self._ignored) <= MAX_IGNORED_NAMES

    def header(self) -> str:
        """Return the value of `HEADER`: the names, and the number of further ones; empty: none."""
        shown: list[str] = []
        for name in self._ignored:
            if sum(map(len, shown)) + 2 * len(shown) + len(name) > _MAX_HEADER_LENGTH:
                return f"{', '.join(shown)}, +{len(self._ignored) - len(shown)}"
            shown.append(name)
        return ", ".join(shown)


class IgnoredNames:
    """Logs each ignored name once, at most `MAX_LOGGED_NAMES`."""

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
    """Return a hint at the known name that a typo resembles; None if it is not a typo."""
    if len(name) > _MAX_TYPO_LENGTH or name in _OTHER_SERVERS_NAMES:
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
    """Normalize a name, so that maxTokens, max-tokens and max_tokens are equal."""
    return _NOT_A_LETTER.sub("", name.casefold())


def _looks_like(name: str, known: str) -> bool:
    most = 0 if len(known) <= 2 else 1 if len(known) <= _MAX_SHORT_NAME else 2
    if abs(len(name) - len(known)) > most or len(set(name) ^ set(known)) > 2 * most:
        return False  # each edit changes at most two letters of the set
    return is_within_edits(name, known, most)


def is_within_edits(first: str, second: str, most: int) -> bool:
    """Return whether at most `most` insertions, deletions, replacements or swaps make texts equal.

    Optimal string alignment, the restricted form of the distance of Damerau (1964).

    Args:
        first, second: texts.
        most: maximum number of edits.
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
            return False  # later rows cannot be lower
    return row[-1] <= most
