"""The tables of cases that other tests are made of."""

from __future__ import annotations

import itertools

import pytest

from pairwise import covering_rows, pairwise


@pytest.mark.parametrize("sizes", [(3,), (2, 5), (4, 3, 8), (4, 4, 3, 3, 3), (2, 2, 2, 2, 2, 2, 2)], ids=str)
def test_any_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = covering_rows(sizes)
    assert len(set(rows)) == len(rows)
    for columns in itertools.combinations(range(len(sizes)), min(2, len(sizes))):
        met = {tuple(row[column] for column in columns) for row in rows}
        assert met == set(itertools.product(*(range(sizes[column]) for column in columns)))


def test_tables_are_short() -> None:
    assert len(covering_rows((4, 3, 8))) == 32
    assert len(covering_rows((4, 4, 3, 3, 3))) <= 18


def test_ids_say_what_a_case_is() -> None:
    mark = pairwise(dtype=["bf16", "fp32"], width=[24], layout={"grouped": (6, 2)}, biased=[True, False])
    assert sorted(case.id for case in mark.args[1]) == [
        "bf16-width24-grouped-biased",
        "bf16-width24-grouped-not_biased",
        "fp32-width24-grouped-biased",
        "fp32-width24-grouped-not_biased",
    ]
