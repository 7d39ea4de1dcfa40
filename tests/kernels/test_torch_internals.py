"""Operators of torch that are not public."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import torch_internals


def test_a_missing_operator_is_named_with_the_version_that_has_it() -> None:
    with pytest.raises(
        ImportError, match=rf"no torch\.ops\.mkldnn\._gone.*torch=={torch_internals.TESTED_TORCH}"
    ):
        torch_internals.torch_operator("ops.mkldnn._gone")


def test_int8_products_are_exact() -> None:
    rows, columns = torch.full((3, 64), -127, dtype=torch.int8), torch.full((64, 8), 127, dtype=torch.int8)
    assert (torch_internals.int8_product(rows, columns) == -127 * 127 * 64).all()
