"""Log-probabilities of the model's own distribution: before penalties, bans, temperature and filters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quire.execution.arrays import Float32Array, Int64Array
from quire.kernels.sampling.rows import SamplingKernels
from quire.step import PositionLogprobs


def position_logprobs(
    logits: Float32Array,
    chosen: Int64Array,
    num_logprobs: Int64Array,
    *,
    rows: Int64Array,
    kernels: SamplingKernels,
) -> list[PositionLogprobs]:
    """Return the log-probabilities at each row's position.

    Args:
        logits: [R, V] as the model gave them, without NaN, at least one finite in each row.
        chosen: [S] the token that follows, reported first.
        num_logprobs: [S] how many of the most likely tokens to report as well, 0 or more.
        rows: [S] which rows of `logits` these are.
        kernels: scan the rows.
    """
    maxima = kernels.largest(logits, rows)[1]
    log_mass = maxima + np.log(kernels.sum_exp(logits, maxima, np.ones(len(rows)), rows))
    most = min(int(num_logprobs.max()), logits.shape[1])
    top_ids = (
        top_tokens(logits, most, rows=rows, kernels=kernels)
        if most
        else np.empty((len(rows), 0), dtype=np.int64)
    )
    ids = np.concatenate((chosen[:, None], top_ids), axis=1)
    logprobs = logits[rows[:, None], ids] - log_mass[:, None]
    top_ranks = list(range(1, 1 + most))
    ranks = kernels.ranks(logits, chosen, rows).tolist()
    columns = zip(ids.tolist(), logprobs.tolist(), ranks, num_logprobs.tolist(), strict=True)
    return [
        PositionLogprobs(row_ids[: 1 + count], row_logprobs[: 1 + count], [rank, *top_ranks[:count]])
        for row_ids, row_logprobs, rank, count in columns
    ]


def of_device(
    token_ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor, num_logprobs: Int64Array
) -> Iterator[PositionLogprobs]:
    """Yield the log-probabilities at each row's position of what `TokenChoice.logprobs` has computed.

    Args:
        token_ids, logprobs, ranks: see `RowLogprobs`; on the host.
        num_logprobs: [S] how many of the likeliest tokens each row reports.
    """
    columns = zip(num_logprobs.tolist(), token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    for count, ids, values, rank in columns:
        end = 1 + count
        yield PositionLogprobs(ids[:end], values[:end], [rank, *range(1, len(ids[:end]))])


def top_tokens(logits: Float32Array, count: int, *, rows: Int64Array, kernels: SamplingKernels) -> Int64Array:
    """Return the ids of the `count` (1 to 128) likeliest tokens of each row, in order: [S, min(count, V)]."""
    count = min(count, logits.shape[1])
    head = kernels.likeliest(logits, rows)
    top = np.empty((len(rows), count), dtype=np.int64)
    enough = head.count >= count
    if enough.any():
        top[enough] = head.token_ids[enough, :count]
    for index in np.flatnonzero(~enough).tolist():
        top[index] = np.argsort(-logits[rows[index]], kind="stable")[:count]
    return top
