"""Arrival times: a renewal process with gamma-distributed gaps; a Poisson process is a special case."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Draw arrival times [count] in seconds; the first is 0.

    The gaps have mean 1 / `rate` and coefficient of variation 1 / sqrt(`burstiness`). With a burstiness of 1
    they are exponential, and the process is Poisson.

    Args:
        rate: requests per second; infinity means all at once.
        burstiness: shape parameter of the gamma distribution.
    """
    if rate == math.inf:
        return np.zeros(count)
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])
