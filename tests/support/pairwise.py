"""Test cases in which any two values of two parameters meet, instead of every combination of all values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(*, indirect: Sequence[str] = (), **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that every value of a parameter meets every value of every other.

    The id of a case is made of its values: strings and types by themselves, numbers behind their parameter's
    name. A mapping of labels to values says what else they are called.

    Args:
        indirect: the parameters that go to the fixture of their name.
        values: what each parameter may be.
    """
    labelled = [
        list(column.items())
        if isinstance(column, dict)
        else [(label(name, value), value) for value in column]
        for name, column in values.items()
    ]
    cases = []
    for row in covering_rows([len(column) for column in labelled]):
        labels, chosen = zip(
            *(column[number] for column, number in zip(labelled, row, strict=True)), strict=True
        )
        cases.append(pytest.param(*chosen, id="-".join(labels)))
    return pytest.mark.parametrize(tuple(values), cases, indirect=list(indirect))


def label(name: str, value: Any) -> str:
    """Return what a value of the parameter `name` is called in the id of a case."""
    if isinstance(value, bool):
        return name if value else f"not_{name}"
    if isinstance(value, int | float):
        return f"{name}{value}"
    if isinstance(value, tuple | list):
        return f"{name}{'x'.join(str(part).removeprefix('torch.') for part in value)}"
    return str(value).removeprefix("torch.")


def covering_rows(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows with a number below each size, in which any two numbers of two columns occur together.

    Greedy: each row takes a pair that is still missing, and then whatever adds most. The same sizes give the
    same rows.
    """
    columns = range(len(sizes))
    missing = {
        ((first, a), (second, b)): None  # a set that keeps its order
        for first, second in itertools.combinations(sorted(columns, key=lambda column: -sizes[column]), 2)
        for a, b in itertools.product(range(sizes[first]), range(sizes[second]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in sorted(set(columns) - set(row), key=lambda column: -sizes[column]):
            counts = [
                sum(pair in missing for cell in row.items() for pair in ((cell, new), (new, cell)))
                for new in ((column, number) for number in range(sizes[column]))
            ]
            turn = len(rows) % sizes[column]  # among equals not always the first
            row[column] = max(range(sizes[column]), key=lambda number: (counts[number], number == turn))
        for pair in itertools.permutations(row.items(), 2):
            missing.pop(pair, None)
        rows.append(tuple(row[column] for column in columns))
    return rows if len(sizes) > 1 else [(number,) for number in range(sizes[0])]
