"""Operators of torch that are not public."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.devices import torch_internals

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_a_missing_operator_is_named_with_the_version_that_has_it() -> None:
    with pytest.raises(
        ImportError, match=rf"no torch\.ops\.mkldnn\._gone.*torch=={torch_internals.TESTED_TORCH}"
    ):
        torch_internals.torch_operator("ops.mkldnn._gone")


def test_int8_products_are_exact() -> None:
    rows, columns = torch.full((3, 64), -127, dtype=torch.int8), torch.full((64, 8), 127, dtype=torch.int8)
    assert (torch_internals.int8_product(rows, columns) == -127 * 127 * 64).all()


def test_the_version_named_is_the_one_that_is_installed_for_tests() -> None:
    assert f"torch=={torch_internals.TESTED_TORCH}" in CONSTRAINTS.read_text().split()
