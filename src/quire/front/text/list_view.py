"""The first entries of a list that only grows, without a copy of them for each output so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar, overload

from typing_extensions import override

T = TypeVar("T")


class Prefix(Sequence[T], Generic[T]):
    """The entries that a list had when this was made; it must only grow. Equal to a list of the same entries.

    Args:
        entries: the list.
    """

    __slots__ = ("_entries", "_length")

    def __init__(self, entries: list[T]) -> None:
        self._entries = entries
        self._length = len(entries)

    @override
    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    @override
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step > 0:
                return self._entries[start : max(start, stop) : step]
            return [self._entries[position] for position in range(start, stop, step)]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"there are {self._length} entries, and none at {index}")
        return self._entries[position]

    @override
    def __iter__(self) -> Iterator[T]:
        return islice(self._entries, self._length)

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | Prefix):
            return len(other) == self._length and all(map(_equal, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    @override
    def __repr__(self) -> str:
        return repr(list(self))


def _equal(one: object, other: object) -> bool:
    return one == other
