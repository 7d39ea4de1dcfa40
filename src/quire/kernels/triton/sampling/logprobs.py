"""Log-probabilities in Triton: what `quire.kernels.sampling.host_choice` computes on the host."""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.bounds import MAX_HEAD_TOKENS, MIN_HEAD_TOKENS
from quire.kernels.sampling.token_choice import RowLogprobs
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.sampling import row_scans
from quire.kernels.triton.sampling.key_search import SEARCH_PART, SEARCH_STEPS, SEARCH_WARPS, find_key, key_of
from quire.kernels.triton.tensors import check_vector


@kernel(do_not_specialize=["num_wanted"])
def _fill_heads_kernel(
    logits,
    rows,
    maxima,
    counts,
    head_logits,
    head_ids,
    num_wanted,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write the likeliest tokens of rows whose heads have fewer than are wanted, in the order of ids."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    logits_row = tl.load(rows + row)
    if (logits_row < 0) | (tl.load(counts + row) >= num_wanted):
        return
    row_at = logits + logits_row * row_stride
    lowest = key_of(tl.full((), float("-inf"), tl.float32))
    num_tokens = tl.full((), VOCAB_SIZE, tl.int64)
    last_wanted = (num_wanted - 1).to(tl.float64)
    last_key, before, _, _ = find_key(
        row_at, tl.load(maxima + row), tl.full((), 1.0, tl.float64), lowest, num_tokens, last_wanted,
        BY_COUNT=True, OR_EQUAL=False, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
    )  # fmt: skip
    num_equal = tl.full((), 0, tl.int64)
    count = tl.full((), 0, tl.int64)
    for start in range(0, VOCAB_SIZE, PART):
        place = start + tl.arange(0, PART)
        is_logit = place < VOCAB_SIZE
        found = tl.load(row_at + place, mask=is_logit, other=float("-inf"))
        key = key_of(found)
        has_last = is_logit & (key == last_key)
        nth_equal = num_equal + tl.cumsum(has_last.to(tl.int32), axis=0)
        is_taken = (key > last_key) | (has_last & (before + nth_equal <= num_wanted))
        column = count + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
        tl.store(head_ids + row * WIDTH + column, place.to(tl.int64), mask=is_taken)
        tl.store(head_logits + row * WIDTH + column, found, mask=is_taken)
        num_equal += tl.sum(has_last.to(tl.int32), axis=0)
        count += tl.sum(is_taken.to(tl.int32), axis=0)


def row_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
) -> RowLogprobs:
    """Do what `TokenChoice.logprobs` says.

    Raises:
        TypeError, ValueError: tensors have other types or shapes than it says, or `num_likeliest` is out of
            range.
    """
    most = min(MIN_HEAD_TOKENS, logits.shape[1])
    if not 0 <= num_likeliest <= most:
        raise ValueError(f"{num_likeliest} of the likeliest tokens are wanted; there are up to {most}")
    check_vector("rows", rows, torch.int64, len(rows))
    check_vector("chosen", chosen, torch.int64, len(rows))
    chosen = chosen.clamp(0, logits.shape[1] - 1)
    maxima = row_scans.largest(logits, rows)[1]
    sound = rows.masked_fill(~maxima.isfinite(), -1)
    ones = torch.ones_like(maxima, dtype=torch.float64)
    log_mass = maxima + row_scans.sum_exp(logits, maxima, ones, sound).log()
    ids, values = chosen[:, None], logits[rows, chosen][:, None]
    if num_likeliest:
        top_ids, top_values = _likeliest(logits, maxima, num_likeliest, sound)
        ids, values = torch.cat((ids, top_ids), dim=1), torch.cat((values, top_values), dim=1)
    ranks = row_scans.ranks(logits, chosen, sound)
    return RowLogprobs(ids, values - log_mass[:, None], ranks, maxima)


def _likeliest(
    logits: torch.Tensor, maxima: torch.Tensor, count: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and logits of the `count` likeliest tokens of each row, [S, count] each."""
    values, ids, counts, _ = row_scans.likeliest(logits, rows)
    vocab_size = logits.shape[1]
    if len(rows):
        _fill_heads_kernel[(len(rows),)](
            logits, rows, maxima, counts, values, ids, count, logits.stride(0), VOCAB_SIZE=vocab_size,
            WIDTH=MAX_HEAD_TOKENS, PART=min(next_power_of_2(vocab_size), SEARCH_PART),
            STEPS=SEARCH_STEPS, num_warps=SEARCH_WARPS,
        )  # fmt: skip
    values, order = values[:, :count].sort(dim=1, descending=True, stable=True)
    return ids[:, :count].gather(1, order), values
