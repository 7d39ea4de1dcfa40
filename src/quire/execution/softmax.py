"""Unnormalized probabilities in float64, computed row by row in an order that other rows cannot change."""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import Float32Array, Float64Array

_CHUNK_ELEMENTS = 1 << 16  # half a megabyte of float64: stays in the core's cache


def relative_weights(logits: Float32Array, maxima: Float32Array, temperature: Float64Array) -> Float64Array:
    """Return probabilities relative to that of each row's likeliest token, which is exactly 1.

    Args:
        logits: [S, any].
        maxima: [S] the largest logit of each row, finite.
        temperature: [S] above 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        exponents = np.subtract(logits, maxima[:, None], dtype=np.float64)
        exponents /= temperature[:, None]
        weights: Float64Array = np.exp(exponents, out=exponents)
    return weights


def sum_exp(logits: Float32Array, maxima: Float32Array, temperature: Float64Array) -> Float64Array:
    """Return each row's sum of `relative_weights`, [S]."""
    num_rows, vocab_size = logits.shape
    sums = np.empty(num_rows)
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        sums[rows] = relative_weights(logits[rows], maxima[rows], temperature[rows]).sum(axis=1)
    return sums
