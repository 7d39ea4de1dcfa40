"""Names for the numpy arrays that the sampler works on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


def take_rows(matrix: Float32Array, rows: Int64Array) -> Float32Array:
    """Return `matrix[rows]` for rising, distinct `rows`, without a copy when that is all of them."""
    return matrix if len(rows) == len(matrix) else matrix[rows]
