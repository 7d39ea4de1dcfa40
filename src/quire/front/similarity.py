"""Scores of models that make embeddings: how alike the embeddings of two texts are.

The functions are those of sentence-transformers, by its names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quire.request_output import PoolingRequestOutput

_Numbers = npt.NDArray[np.float64]
Row = npt.NDArray[np.float32]


def likeness(similarity: str, first: Row, second: Row) -> Row:
    """Return how alike two rows [N] are by the function of a name, as a row of one number."""
    return np.array([_FUNCTIONS[similarity](first.astype(np.float64), second.astype(np.float64))], np.float32)


def _cosine(one: _Numbers, other: _Numbers) -> float:
    """Return the cosine of the angle between two rows; 0 if one of them is all zeros."""
    norms = math.sqrt(one @ one) * math.sqrt(other @ other)
    return float(one @ other / norms) if norms else 0.0


_FUNCTIONS: dict[str, Callable[[_Numbers, _Numbers], float]] = {
    "cosine": _cosine,
    "dot": lambda one, other: float(one @ other),
    "euclidean": lambda one, other: -math.sqrt((one - other) @ (one - other)),
    "manhattan": lambda one, other: -float(np.abs(one - other).sum()),
}


def different_texts(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """Return the different texts of pairs, each with its side, 0 or 1; and the numbers of each pair's."""
    texts = list(dict.fromkeys((side, pair[side]) for side in (0, 1) for pair in pairs))
    numbers = {text: number for number, text in enumerate(texts)}
    return texts, [(numbers[0, first], numbers[1, second]) for first, second in pairs]


def pair_output(
    similarity: str, first: PoolingRequestOutput, second: PoolingRequestOutput
) -> PoolingRequestOutput:
    """Return the score of two texts, whose requests have ended; if one has failed, its failure."""
    rows = first.outputs.data, second.outputs.data
    if rows[0] is None or rows[1] is None:
        outputs = (first if rows[0] is None else second).outputs
    else:
        outputs = dataclasses.replace(second.outputs, data=likeness(similarity, rows[0], rows[1]))
    return PoolingRequestOutput(
        request_id=second.request_id,
        prompt=None,
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        outputs=outputs,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        finished=True,
    )
