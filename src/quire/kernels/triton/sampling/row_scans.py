"""Scans of whole rows of logits in Triton: no row is sorted, and its parts have a program each.

Tensors are on the device, and nothing waits for it. Logits are [R, V] float32; `rows` [S] int64 says which
of them to work on, None: all. What `likeliest`, `sum_exp` and `ranks` return for a row that is negative means
nothing: such a row costs no work, and it takes no host to leave it out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.bounds import MAX_HEAD_TOKENS, MIN_HEAD_TOKENS
from quire.kernels.sampling.row_scans import LOWEST, group_size
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous, is_interpreted
from quire.kernels.triton.kernel import kernel
from quire.step import NO_TOKEN

_PART = 1 << 16 if is_interpreted else 4096  # logits of a program
_BEYOND = tl.constexpr(2**31 - 1)  # all token ids
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _row_at(logits, rows, row, row_stride, HAS_ROWS: tl.constexpr):
    """Return where the row begins that is number `row` of those to work on."""
    if HAS_ROWS:
        row = tl.load(rows + row)
    return logits + row * row_stride


@triton.jit
def _is_left_out(rows, row, HAS_ROWS: tl.constexpr):
    is_left_out = False
    if HAS_ROWS:
        is_left_out = tl.load(rows + row) < 0
    return is_left_out


@kernel(do_not_specialize_on_alignment=["rows"])
def _largest_kernel(
    logits,
    ids,
    rows,
    best_ids,
    best_logits,
    num_logits,
    row_stride,
    HAS_ROWS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    NEEDS_FINITE: tl.constexpr,
    PART: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    is_logit = place < num_logits
    found = tl.load(
        _row_at(logits, rows, row, row_stride, HAS_ROWS) + place, mask=is_logit, other=float("-inf")
    )
    token = place.to(tl.int64)
    if HAS_IDS:
        token = tl.load(ids + row * num_logits + place, mask=is_logit, other=_BEYOND)
    is_nan = found != found
    first_nan = tl.min(tl.where(is_nan, token, _BEYOND), axis=0)
    best = tl.max(tl.where(is_nan, float("-inf"), found), axis=0)
    first_best = tl.min(tl.where(is_logit & (found == best), token, _BEYOND), axis=0)
    best_id = tl.where(first_nan < _BEYOND, first_nan, first_best)
    best = tl.where(first_nan < _BEYOND, float("nan"), best)
    if NEEDS_FINITE:
        best_id = tl.where(tl.abs(best) < float("inf"), best_id, _NO_TOKEN)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ids + at, best_id)
    tl.store(best_logits + at, best)


@kernel()
def _group_maxima_kernel(
    logits,
    rows,
    maxima,
    vocab_size,
    num_groups,
    group_size,
    row_stride,
    HAS_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(rows, row, HAS_ROWS):
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    in_group = tl.arange(0, SIZE)
    place = group[:, None] * group_size + in_group[None, :]
    is_logit = (in_group < group_size)[None, :] & (place < vocab_size)
    found = tl.load(
        _row_at(logits, rows, row, row_stride, HAS_ROWS) + place, mask=is_logit, other=float("-inf")
    )
    tl.store(maxima + row * num_groups + group, tl.max(found, axis=1), mask=group < num_groups)


@kernel()
def _collect_kernel(
    logits,
    rows,
    thresholds,
    head_ids,
    head_logits,
    counts,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(rows, row, HAS_ROWS):
        return
    row_at = _row_at(logits, rows, row, row_stride, HAS_ROWS)
    threshold = tl.load(thresholds + row)
    count = tl.zeros((), tl.int32)
    for start in range(0, VOCAB_SIZE, PART):
        place = start + tl.arange(0, PART)
        found = tl.load(row_at + place, mask=place < VOCAB_SIZE, other=float("-inf"))
        is_taken = found >= threshold
        taken = is_taken.to(tl.int32)
        column = count + tl.cumsum(taken, axis=0) - 1
        is_stored = is_taken & (column < WIDTH)
        tl.store(head_ids + row * WIDTH + column, place.to(tl.int64), mask=is_stored)
        tl.store(head_logits + row * WIDTH + column, found, mask=is_stored)
        count += tl.sum(taken, axis=0)
    tl.store(counts + row, count.to(tl.int64))


@kernel(do_not_specialize_on_alignment=["temperatures"])
def _sum_exp_kernel(
    logits,
    maxima,
    temperatures,
    rows,
    sums,
    vocab_size,
    row_stride,
    HAS_ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(rows, row, HAS_ROWS):
        return
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    row_at = _row_at(logits, rows, row, row_stride, HAS_ROWS)
    found = tl.load(row_at + place, mask=place < vocab_size, other=float("-inf")).to(tl.float64)
    depth = (found - tl.load(maxima + row).to(tl.float64)) / tl.load(temperatures + row)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.exp(depth), axis=0))


@kernel()
def _add_up_kernel(parts, sums, num_parts, BLOCK: tl.constexpr):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    added = tl.load(parts + row * num_parts + place, mask=place < num_parts, other=0)
    tl.store(sums + row, tl.sum(added, axis=0))


@kernel(do_not_specialize_on_alignment=["rows", "token_ids"])
def _before_kernel(
    logits, token_ids, rows, counts, vocab_size, row_stride, HAS_ROWS: tl.constexpr, PART: tl.constexpr
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(rows, row, HAS_ROWS):
        return
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    row_at = _row_at(logits, rows, row, row_stride, HAS_ROWS)
    token = tl.load(token_ids + row)
    own = tl.load(row_at + token)
    found = tl.load(row_at + place, mask=place < vocab_size, other=float("-inf"))
    is_before = (found > own) | ((found == own) & (place < token))
    tl.store(counts + row * tl.num_programs(1) + tl.program_id(1), tl.sum(is_before.to(tl.int64), axis=0))


def largest(
    logits: torch.Tensor, rows: torch.Tensor | None = None, *, needs_finite: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, logits), [S] each, as `RowScans.largest` says.

    With `needs_finite`, the token of a row whose largest logit is not finite is `NO_TOKEN`.
    """
    num_rows, vocab_size = _num_rows(logits, rows), logits.shape[1]
    num_parts = -(-vocab_size // _PART)
    ids = logits.new_empty(num_rows, num_parts, dtype=torch.int64)
    best = logits.new_empty(num_rows, num_parts)
    if num_rows:
        _largest_kernel[(num_rows, num_parts)](
            logits, None, rows, ids, best, vocab_size, logits.stride(0),
            HAS_ROWS=rows is not None, HAS_IDS=False, NEEDS_FINITE=needs_finite and num_parts == 1,
            PART=_part(vocab_size),
        )  # fmt: skip
    if num_rows and num_parts > 1:
        parts_of_ids, parts = ids, best
        ids, best = ids.new_empty(num_rows, 1), best.new_empty(num_rows, 1)
        _largest_kernel[(num_rows, 1)](
            parts, parts_of_ids, None, ids, best, num_parts, num_parts,
            HAS_ROWS=False, HAS_IDS=True, NEEDS_FINITE=needs_finite, PART=next_power_of_2(num_parts),
        )  # fmt: skip
    return ids[:, 0], best[:, 0]


def likeliest(
    logits: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, token ids, count, complete) of heads that are `MAX_HEAD_TOKENS` wide, see `Head`."""
    num_rows, vocab_size = _num_rows(logits, rows), logits.shape[1]
    thresholds = _thresholds(logits, rows, num_rows)
    values = logits.new_full((num_rows, MAX_HEAD_TOKENS), float("-inf"))
    token_ids = logits.new_zeros((num_rows, MAX_HEAD_TOKENS), dtype=torch.int64)
    count = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _collect_kernel[(num_rows,)](
            logits, rows, thresholds, token_ids, values, count, logits.stride(0),
            VOCAB_SIZE=vocab_size, WIDTH=MAX_HEAD_TOKENS, HAS_ROWS=rows is not None, PART=_part(vocab_size),
        )  # fmt: skip
    is_crowded = count > MAX_HEAD_TOKENS
    values.masked_fill_(is_crowded[:, None], float("-inf"))
    token_ids.masked_fill_(is_crowded[:, None], 0)
    values, order = values.sort(dim=1, descending=True, stable=True)  # ids rise, so ties go by id
    is_complete = (thresholds == LOWEST) & ~is_crowded
    return values, token_ids.gather(1, order), count.masked_fill_(is_crowded, 0), is_complete


def sum_exp(
    logits: torch.Tensor, maxima: torch.Tensor, temperatures: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [S] float64, as `RowScans.sum_exp` says."""
    num_rows, vocab_size = _num_rows(logits, rows), logits.shape[1]
    parts = logits.new_empty(num_rows, -(-vocab_size // _PART), dtype=torch.float64)
    if num_rows:
        _sum_exp_kernel[tuple(parts.shape)](
            logits, maxima, temperatures, rows, parts, vocab_size, logits.stride(0),
            HAS_ROWS=rows is not None, PART=_part(vocab_size),
        )  # fmt: skip
    return _added_up(parts)


def ranks(logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return [S] int64, as `RowScans.ranks` says."""
    num_rows, vocab_size = _num_rows(logits, rows), logits.shape[1]
    parts = logits.new_empty(num_rows, -(-vocab_size // _PART), dtype=torch.int64)
    if num_rows:
        _before_kernel[tuple(parts.shape)](
            logits, token_ids, rows, parts, vocab_size, logits.stride(0),
            HAS_ROWS=rows is not None, PART=_part(vocab_size),
        )  # fmt: skip
    return _added_up(parts).add_(1)


def _thresholds(logits: torch.Tensor, rows: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Return for each row a logit that at least 128 tokens reach, the lowest float if fewer are finite.

    It is the 128th largest maximum of groups of tokens, as in the reference.
    """
    vocab_size = logits.shape[1]
    size = group_size(vocab_size)
    if not size or not num_rows:
        return logits.new_full((num_rows,), LOWEST)
    padded = next_power_of_2(size)
    groups = max(_part(vocab_size) // padded, 1)
    maxima = logits.new_empty(num_rows, -(-vocab_size // size))
    _group_maxima_kernel[(num_rows, -(-maxima.shape[1] // groups))](
        logits, rows, maxima, vocab_size, maxima.shape[1], size, logits.stride(0),
        HAS_ROWS=rows is not None, GROUPS=groups, SIZE=padded,
    )  # fmt: skip
    return maxima.topk(MIN_HEAD_TOKENS, dim=1).values[:, -1].clamp(min=LOWEST)


def _added_up(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, added in an order that depends on their length only."""
    num_rows, num_parts = parts.shape
    sums = parts.new_empty(num_rows)
    if num_rows:
        _add_up_kernel[(num_rows,)](parts, sums, num_parts, BLOCK=next_power_of_2(num_parts))
    return sums


def _num_rows(logits: torch.Tensor, rows: torch.Tensor | None) -> int:
    return len(logits) if rows is None else len(rows)


def _part(vocab_size: int) -> int:
    """Return how many logits a program reads."""
    return min(next_power_of_2(vocab_size), _PART)
