"""Scores of models that make embeddings: the cosine of the angle between the embeddings of two texts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from quire.request_output import PoolingRequestOutput


def cosine(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the cosine of two rows [N], as a row of one number; 0 if one of them is all zeros."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    norms = math.sqrt(one @ one) * math.sqrt(other @ other)
    return np.array([one @ other / norms if norms else 0.0], dtype=np.float32)


def similarity(first: PoolingRequestOutput, second: PoolingRequestOutput) -> PoolingRequestOutput:
    """Return the score of two texts, whose requests have ended; if one has failed, its failure."""
    rows = first.outputs.data, second.outputs.data
    if rows[0] is None or rows[1] is None:
        outputs = (first if rows[0] is None else second).outputs
    else:
        outputs = dataclasses.replace(second.outputs, data=cosine(rows[0], rows[1]))
    return PoolingRequestOutput(
        request_id=second.request_id,
        prompt=None,
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        outputs=outputs,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        finished=True,
    )
