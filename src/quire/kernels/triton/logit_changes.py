"""What some rows of logits may not choose, and what is added to others, in Triton, where the logits are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.token_choice import LogitChanges
from quire.kernels.triton.device import await_previous, is_interpreted
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.tensors import check_vector

_PART = 1 << 16 if is_interpreted else 4096  # logits of a program
_PAIRS = 256  # of row and id, of a program


@kernel(do_not_specialize_on_alignment=["bitmask", "mask_of_row"])
def _forbid_kernel(logits, bitmask, mask_of_row, vocab_size, row_stride, mask_stride, PART: tl.constexpr):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_row + row)
    if mask < 0:
        return
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    is_logit = place < vocab_size
    word = tl.load(bitmask + mask * mask_stride + place // 32, mask=is_logit, other=0)
    is_allowed = (word >> (place % 32)) & 1
    tl.store(logits + row * row_stride + place, float("-inf"), mask=is_logit & (is_allowed == 0))


@kernel(
    do_not_specialize=["num_added"],
    do_not_specialize_on_alignment=["rows", "token_ids", "added"],
)
def _add_kernel(
    logits, rows, token_ids, added, num_added, row_stride, IS_BAN: tl.constexpr, PART: tl.constexpr
):
    await_previous()
    place = tl.program_id(0) * PART + tl.arange(0, PART)
    is_added = place < num_added
    row = tl.load(rows + place, mask=is_added, other=0)
    at = logits + row * row_stride + tl.load(token_ids + place, mask=is_added, other=0)
    if IS_BAN:
        tl.store(at, float("-inf"), mask=is_added)
    else:
        value = tl.load(added + place, mask=is_added, other=0.0)
        tl.store(at, tl.load(at, mask=is_added, other=0.0) + value, mask=is_added)


def change_logits(logits: torch.Tensor, changes: LogitChanges) -> None:
    """Change logits [R, V] float32 in place.

    Raises:
        TypeError, ValueError: tensors have other types or shapes than `LogitChanges` says.
    """
    num_rows, vocab_size = logits.shape
    _check(changes, num_rows, vocab_size)
    if num_rows and len(changes.bitmask):
        part = min(int(triton.next_power_of_2(vocab_size)), _PART)
        _forbid_kernel[(num_rows, triton.cdiv(vocab_size, part))](
            logits, changes.bitmask, changes.mask_of_row, vocab_size, logits.stride(0),
            changes.bitmask.stride(0), PART=part,
        )  # fmt: skip
    _add(logits, changes.biased_rows, changes.biased_ids, changes.biases)
    _add(logits, changes.banned_rows, changes.banned_ids, None)


def _add(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, added: torch.Tensor | None
) -> None:
    """Add to the logits of pairs of row and id, or ban them if there is nothing to add."""
    num_added = len(rows)
    if num_added:
        _add_kernel[(triton.cdiv(num_added, _PAIRS),)](
            logits, rows, token_ids, added, num_added, logits.stride(0), IS_BAN=added is None, PART=_PAIRS
        )


def _check(changes: LogitChanges, num_rows: int, vocab_size: int) -> None:
    num_biased, num_banned = len(changes.biased_rows), len(changes.banned_rows)
    wanted = {
        "mask_of_row": (torch.int64, num_rows),
        "biased_rows": (torch.int64, num_biased),
        "biased_ids": (torch.int64, num_biased),
        "biases": (torch.float32, num_biased),
        "banned_rows": (torch.int64, num_banned),
        "banned_ids": (torch.int64, num_banned),
    }
    for name, (dtype, length) in wanted.items():
        check_vector(name, getattr(changes, name), dtype, length)
    bitmask = changes.bitmask
    if bitmask.dtype is not torch.int32:
        raise TypeError(f"bitmask is {bitmask.dtype}; it must be torch.int32")
    has_gaps = len(bitmask) > 0 and bitmask.stride(1) != 1  # what is empty may have any strides
    if bitmask.dim() != 2 or bitmask.shape[1] * 32 < vocab_size or has_gaps:
        raise ValueError(
            f"bitmask is {tuple(bitmask.shape)} with strides {bitmask.stride()}; it must be two-dimensional, "
            f"have {-(-vocab_size // 32)} columns or more, and a row's numbers adjacent"
        )
