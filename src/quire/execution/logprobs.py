"""Log-probabilities of the model's own distribution: before penalties, bans, temperature and filters."""

from __future__ import annotations

import numpy as np

from quire.execution.arrays import Float32Array, Int64Array
from quire.execution.ordering import top_tokens
from quire.execution.softmax import sum_exp
from quire.step import PositionLogprobs


def position_logprobs(
    logits: Float32Array, chosen: Int64Array, num_logprobs: Int64Array
) -> list[PositionLogprobs]:
    """Return the log-probabilities at each row's position.

    Args:
        logits: [S, V] as the model gave them, without NaN, at least one finite in each row.
        chosen: [S] the token that follows, reported first.
        num_logprobs: [S] how many of the likeliest tokens to report besides, 0 or more.
    """
    rows = np.arange(len(logits))
    maxima = logits.max(axis=1)
    log_mass = maxima + np.log(sum_exp(logits, maxima, np.ones(len(logits))))
    most = min(int(num_logprobs.max()), logits.shape[1])
    top_ids = top_tokens(logits, most) if most else np.empty((len(logits), 0), dtype=np.int64)
    ids = np.concatenate((chosen[:, None], top_ids), axis=1)
    logprobs = logits[rows[:, None], ids] - log_mass[:, None]
    top_ranks = list(range(1, 1 + most))
    ranks = [_rank(row, token_id) for row, token_id in zip(logits, chosen.tolist(), strict=True)]
    columns = zip(ids.tolist(), logprobs.tolist(), ranks, num_logprobs.tolist(), strict=True)
    return [
        PositionLogprobs(row_ids[: 1 + count], row_logprobs[: 1 + count], [rank, *top_ranks[:count]])
        for row_ids, row_logprobs, rank, count in columns
    ]


def _rank(logits: Float32Array, token_id: int) -> int:
    """Return the place of a token among all of [V], 1 for the likeliest; ties go to the lower id."""
    logit = logits[token_id]
    likelier = np.count_nonzero(logits > logit) + np.count_nonzero(logits[:token_id] == logit)
    return 1 + int(likelier)
