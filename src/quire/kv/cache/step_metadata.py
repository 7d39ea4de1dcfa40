"""Which tokens of which sequences a step computes, and the pages that their keys and values go to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.kv.cache.plain_data import PlainData, check_keys
from quire.step import IntArray

NOTHING = 10**7
"""No page, no position, no length: what fills places of a step's tables that hold nothing."""

_DIMENSIONS = {
    "prefill_length": 1,
    "prefill_pos": 1,
    "prefill_page_table": 2,
    "generate_pos": 1,
    "generate_page_table": 2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of a step's keys and values, sequence after sequence, and where each sequence stands.

    Attributes:
        name: "prefill" or "generate".
        num_rows: with padding.
        rows: [T] numbers of the rows that hold a token.
        num_computed_tokens: [S] tokens of each sequence before this step.
        num_tokens: [S] tokens of each in this step, T together.
        page_tables: [S, pages].
    """

    name: str
    num_rows: int
    rows: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    page_tables: IntArray


@dataclasses.dataclass(frozen=True, eq=False)
class PagedAttentionMetadata(PlainData):
    """One step's tables. P prompts, of which T tokens are computed, and G sequences that generate one each.

    Arrays, or what numpy converts to them; a field may lack its first dimension where it has one entry. A
    length, a position or a page of `NOTHING` is padding, as is the row of keys and values at such a position.

    Args:
        prefill_length: [P] tokens of each prompt that are computed.
        prefill_pos: [T] position of each of these tokens in its prompt; those of a prompt follow each other.
            What follows the length of the only prompt is padding too, and so are positions that go on beyond
            the length of one of several, unless they run into those of the next.
        prefill_page_table: [P, pages] of each prompt.
        generate_pos: [G] position of each sequence's token.
        generate_page_table: [G, pages] of each sequence.

    Raises:
        ValueError: a field has too many dimensions, or is not of whole numbers of 32 bits; names it.
    """

    prefill_length: IntArray
    prefill_pos: IntArray
    prefill_page_table: IntArray
    generate_pos: IntArray
    generate_page_table: IntArray

    def __post_init__(self) -> None:
        for name, dimensions in _DIMENSIONS.items():
            given = np.asarray(getattr(self, name))
            if given.ndim > dimensions or (given.size and not np.issubdtype(given.dtype, np.integer)):
                raise ValueError(
                    f"{name} is {given.dtype} {list(given.shape)}; it must be whole numbers in at most "
                    f"{dimensions} dimension{'s' * (dimensions > 1)}"
                )
            narrow = given.astype(np.int32)
            wrong = given[narrow != given]
            if wrong.size:
                raise ValueError(f"{name} has {wrong[0]}; a number is at most {np.iinfo(np.int32).max}")
            object.__setattr__(self, name, narrow)

    @classmethod
    def init_empty(cls) -> Self:
        """Return the tables of a step that computes nothing: every field is `NOTHING`."""
        return cls(*(np.array(NOTHING, dtype=np.int32) for _ in _DIMENSIONS))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PagedAttentionMetadata):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _DIMENSIONS)

    __hash__ = None  # type: ignore[assignment]

    def prefill_rows(self) -> TokenRows:
        """Return the rows of prompts.

        Raises:
            ValueError: lengths, positions and tables do not fit together.
        """
        given = _entries(self.prefill_length)
        tables = _tables("prefill_page_table", self.prefill_page_table, "prefill_length", len(given))
        positions = _entries(self.prefill_pos)
        num_rows = len(positions)
        rows = np.flatnonzero(positions != NOTHING)
        rows = rows[_within_lengths(positions[rows], given[given != NOTHING])]
        positions = positions[rows]
        has_tokens = (given != NOTHING) & (given != 0)
        lengths: npt.NDArray[np.int64] = given[has_tokens].astype(np.int64)
        first: npt.NDArray[np.int64] = positions[np.cumsum(lengths) - lengths].astype(np.int64)
        expected = np.arange(len(rows)) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
        wrong = np.flatnonzero((positions != expected) | (positions < 0))
        if wrong.size:
            raise ValueError(
                f"prefill_pos is {positions[wrong[0]]} at token {wrong[0]}; positions begin at 0 or later, "
                f"and those of a prompt follow each other: {max(expected[wrong[0]], 0)} was expected"
            )
        return TokenRows("prefill", num_rows, rows, first, lengths, tables[has_tokens])

    def generate_rows(self) -> TokenRows:
        """Return the rows of sequences that generate, counted from the first of these.

        Raises:
            ValueError: positions and tables do not fit together.
        """
        given = _entries(self.generate_pos)
        tables = _tables("generate_page_table", self.generate_page_table, "generate_pos", len(given))
        rows = np.flatnonzero(given != NOTHING)
        positions: npt.NDArray[np.int64] = given[rows].astype(np.int64)
        if (positions < 0).any():
            raise ValueError(f"generate_pos is {positions.min()}; a position is at least 0")
        lengths = np.ones(len(rows), dtype=np.int64)
        return TokenRows("generate", len(given), rows, positions, lengths, tables[rows])

    def replace(self, **kwargs: Any) -> Self:
        """Return a copy with other tables."""
        return dataclasses.replace(self, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as lists, or single numbers."""
        return {name: getattr(self, name).tolist() for name in _DIMENSIONS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the tables that `to_dict` wrote down.

        Raises:
            ValueError: a key is missing or unknown, or a table is not one; names it.
        """
        check_keys(cls.__name__, data, _DIMENSIONS)
        return cls(**data)


def _entries(field: IntArray) -> IntArray:
    """Return a field's entries; a single `NOTHING` is none."""
    return np.empty(0, dtype=np.int32) if field.ndim == 0 and field == NOTHING else np.atleast_1d(field)


def _within_lengths(positions: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
    """Return which positions are of tokens that are computed: as many of each prompt as its length says.

    Raises:
        ValueError: there are too few positions, or it is not plain which of them belong to which prompt.
    """
    num_tokens = lengths.sum(dtype=np.int64)
    if (lengths < 0).any() or num_tokens > len(positions):
        raise ValueError(
            f"prefill_length is {lengths.tolist()}, {num_tokens} tokens together, and prefill_pos has the "
            f"positions of {len(positions)}"
        )
    if num_tokens == len(positions) or len(lengths) == 1:
        return np.arange(num_tokens)
    starts = np.flatnonzero(np.diff(positions, prepend=NOTHING) != 1)
    sizes = np.diff(starts, append=len(positions))
    if len(starts) != len(lengths) or (sizes < lengths).any():
        raise ValueError(
            f"prefill_length is {lengths.tolist()}, and the {len(positions)} positions of prefill_pos are "
            f"{len(starts)} runs, of {sizes.tolist()}; with padding, each prompt must have one run, at least "
            f"as long as it is; or give padding the position {NOTHING}"
        )
    return np.flatnonzero(np.arange(len(positions)) - np.repeat(starts, sizes) < np.repeat(lengths, sizes))


def _tables(name: str, tables: IntArray, rows_name: str, num_rows: int) -> IntArray:
    if tables.ndim == 0:
        tables = _entries(tables).reshape(-1, 1)
    tables = np.atleast_2d(tables)
    if not num_rows:
        return tables[:0]
    if len(tables) != num_rows:
        raise ValueError(f"{name} has {len(tables)} rows, and {rows_name} has {num_rows} entries")
    return tables
