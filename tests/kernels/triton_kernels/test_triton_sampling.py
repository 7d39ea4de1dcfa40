"""Rows of logits that many programs share; tests/kernels/test_sampling_kernels.py has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.triton.sampling import row_scans
from triton_scans import TritonSampling

kernels, reference = TritonSampling(), ReferenceScans()


@pytest.mark.parametrize(("vocab_size", "part"), [(2048, 1024), (3001, 512)])
def test_rows_in_parts(vocab_size: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scans, "_PART", part)
    logits = np.random.default_rng(0).normal(size=(6, vocab_size)) * 3
    logits = np.round(logits * 100).astype(np.float32) / 100
    logits[1, [700, 1800]] = np.nan
    logits[2, [600, 1900]] = 20.0
    logits[3] = -np.inf
    logits[4, 20:] = -np.inf
    for found, expected in zip(kernels.largest(logits), reference.largest(logits), strict=True):
        assert np.array_equal(found, expected, equal_nan=True)
    rows = np.array([5, 0, 2, 4])
    head, expected_head = kernels.likeliest(logits, rows), reference.likeliest(logits, rows)
    for name in ("logits", "token_ids", "count", "complete"):
        assert np.array_equal(getattr(head, name), getattr(expected_head, name)), name
    tokens, temperature = np.array([0, 1900, 1900, 3]), np.array([0.5, 1.0, 2.0, 1.0])
    assert np.array_equal(kernels.ranks(logits, tokens, rows), reference.ranks(logits, tokens, rows))
    maxima = reference.largest(logits, rows)[1]
    sums = kernels.sum_exp(logits, maxima, temperature, rows)
    np.testing.assert_allclose(sums, reference.sum_exp(logits, maxima, temperature, rows), rtol=1e-13)
    alone = kernels.sum_exp(logits[2:3], maxima[2:3], temperature[2:3])
    assert alone[0] == sums[2]


def test_what_the_kernels_cannot_take_is_refused() -> None:
    logits = np.zeros((3, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="float64"):
        kernels.largest(logits.astype(np.float64))
    with pytest.raises(ValueError, match="adjacent"):
        kernels.largest(logits[:, ::2])
    with pytest.raises(ValueError, match="rows is int32"):
        kernels.largest(logits, np.arange(2, dtype=np.int32))
    with pytest.raises(IndexError, match="from 0 to 2"):
        kernels.largest(logits, np.array([3]))
    with pytest.raises(ValueError, match="maxima is"):
        kernels.sum_exp(logits, np.zeros(2, dtype=np.float32), np.ones(3))
    with pytest.raises(IndexError, match="from 0 to 7"):
        kernels.ranks(logits, np.array([0, 1, 8]))
    assert kernels.largest(logits, np.arange(0))[0].shape == (0,)
