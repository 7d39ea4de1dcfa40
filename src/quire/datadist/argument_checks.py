"""Argument checks: types first, then values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

UINT64_MAX = 2**64 - 1
"""Means "no id" as `req_id` and `prefix_id`."""

E = TypeVar("E", bound=IntEnum)


class Bounds(NamedTuple):
    """The range of an integer, inclusive."""

    least: int
    greatest: int


U16 = Bounds(0, 2**16 - 1)
U32 = Bounds(0, 2**32 - 1)
U64 = Bounds(0, UINT64_MAX)
I64 = Bounds(-(2**63), 2**63 - 1)
DIMENSION = Bounds(1, I64.greatest)
ADDRESS = Bounds(1, UINT64_MAX)
OFFSET = Bounds(0, I64.greatest)
TIMEOUT_MS = Bounds(1, 2**31 - 1)


class ArgumentChecks:
    """Checks a call's arguments in a context: wrong types raise at once, wrong values at its end.

    A call with both thus raises `TypeError`, regardless of the arguments' order.

    Raises:
        TypeError: from a check, for a wrong type; `None` and `bool` are not integers.
        ValueError: at the end of the context, for the first wrong value.
    """

    def __init__(self) -> None:
        self._wrong_value: str | None = None

    def __enter__(self) -> ArgumentChecks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._wrong_value is not None:
            raise ValueError(self._wrong_value)

    def require(self, condition: bool, message: str) -> None:
        """Note a wrong value unless `condition` holds."""
        if not condition and self._wrong_value is None:
            self._wrong_value = message

    def integer(self, name: str, value: object, bounds: Bounds) -> int:
        """Return an integer, of any type that has `__index__`."""
        number = _index(name, value)
        self.require(
            bounds.least <= number <= bounds.greatest,
            f"{name} is {number}, not in {bounds.least}..{bounds.greatest}",
        )
        return number

    def size(self, name: str, value: object) -> int:
        """Return a number of bytes: at least 1, or -1."""
        number = self.integer(name, value, I64)
        self.require(number > 0 or number == -1, f"{name} is {number}, neither positive nor -1")
        return number

    def instance(self, name: str, value: object, *types: type) -> None:
        """Require an instance of one of `types`."""
        if not isinstance(value, types):
            wanted = " or ".join(one.__name__ for one in types)
            raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}: {value!r:.80}")

    def items(self, name: str, value: object, item: type) -> list[Any]:
        """Return the items of a list or tuple of instances of `item`."""
        self.instance(name, value, list, tuple)
        assert isinstance(value, (list, tuple))
        for index, one in enumerate(value):
            self.instance(f"{name}[{index}]", one, item)
        return list(value)

    def integers(self, name: str, value: object, bounds: Bounds) -> list[int]:
        """Return the integers of a list or tuple."""
        self.instance(name, value, list, tuple)
        assert isinstance(value, (list, tuple))
        return [self.integer(f"{name}[{index}]", one, bounds) for index, one in enumerate(value)]

    def indices(self, name: str, value: object) -> npt.NDArray[np.uint64]:
        """Return the block indices of any sequence or one-dimensional integer array."""
        if isinstance(value, Sequence):
            numbers = [one if type(one) is int else _index(name, one) for one in value]
        else:
            numbers = _array_integers(name, value)
        least, greatest = min(numbers, default=0), max(numbers, default=0)
        if not U64.least <= least <= greatest <= U64.greatest:
            self.require(False, f"{name} has {least} and {greatest}, not in 0..{U64.greatest}")
            return np.empty(0, dtype=np.uint64)
        return np.array(numbers, dtype=np.uint64)

    def pairs(self, name: str, value: object) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the block indices of a dictionary, or of a list or tuple of pairs, as two arrays."""
        self.instance(name, value, dict, list, tuple)
        assert isinstance(value, (dict, list, tuple))
        items = list(value.items()) if isinstance(value, dict) else value
        for index, one in enumerate(items):
            self.instance(f"{name}[{index}]", one, list, tuple)
            self.require(len(one) == 2, f"{name}[{index}] is {one!r:.80}, not a pair")
        numbers = [self.indices(name, one) for one in items]
        if any(len(one) != 2 for one in numbers):
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
        table = np.array(numbers, dtype=np.uint64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def text_options(self, name: str, value: object) -> dict[str, str]:
        """Return a copy of a dictionary of texts by text."""
        self.instance(name, value, dict)
        assert isinstance(value, dict)
        for key, text in value.items():
            self.instance(f"a key of {name}", key, str)
            self.instance(f"{name}[{key!r}]", text, str)
        return dict(value)


def one_of(call: str, **spellings: Any) -> Any:
    """Return the only argument that is not `...` among several spellings of its name.

    Raises:
        TypeError: none or several are given.
    """
    given = [value for value in spellings.values() if value is not ...]
    if len(given) != 1:
        raise TypeError(f"{call}() takes one of {' and '.join(spellings)}")
    return given[0]


def _index(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}: {value!r:.80}")
    try:
        return operator.index(value)
    except TypeError:  # all arrays and tensors have `__index__`
        raise TypeError(f"{name} must be an integer, not {value!r:.80}") from None


def _array_integers(name: str, value: object) -> list[int]:
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be a sequence or a one-dimensional array of integers, "
            f"not {type(value).__name__}: {value!r:.80}"
        )
    numbers: list[int] = array.tolist()
    return numbers
