"""When requests arrive: a renewal process with gamma distributed gaps, of which Poisson is one."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Draw arrival times [count] in seconds; the first is 0.

    Gaps have the mean 1 / `rate` and the coefficient of variation 1 / sqrt(`burstiness`): with a burstiness
    of 1 they are exponential, and the process is Poisson.

    Args:
        rate: requests per second; infinite for all at once.
        burstiness: shape of the gamma distribution of the gaps.
    """
    if rate == math.inf:
        return np.zeros(count)
    gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])
