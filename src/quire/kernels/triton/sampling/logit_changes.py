"""Masks and biases of logits, in Triton."""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.sampling.token_choice import NUM_EDIT_NUMBERS, LogitChanges, LogitEdits, LogitMasks
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous, is_interpreted
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.tensors import check_vector

_PART = 1 << 16 if is_interpreted else 4096  # logits of a program
_EDITS = 256  # of a program


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


@kernel(do_not_specialize=["num_edits"], do_not_specialize_on_alignment=["numbers", "tokens_before"])
def _edit_kernel(logits, numbers, tokens_before, num_edits, vocab_size, row_stride, PART: tl.constexpr):
    await_previous()
    place = tl.program_id(0) * PART + tl.arange(0, PART)
    row = tl.load(numbers + place, mask=place < num_edits, other=-1.0).to(tl.int64)
    is_edit = row >= 0
    at = numbers + place + num_edits
    token = tl.load(at, mask=is_edit, other=0.0).to(tl.int64)
    added = tl.load(at + num_edits, mask=is_edit, other=0.0).to(tl.float32)
    wanted = tl.load(at + 2 * num_edits, mask=is_edit, other=-1.0).to(tl.int64)
    is_edit &= (wanted < 0) | (wanted == tl.load(tokens_before + row, mask=is_edit, other=-1))
    is_edit &= (token >= 0) & (token < vocab_size)  # another is in the next row, which is somebody else's
    # A ban may meet another, or a bias: -inf, in any order.
    tl.atomic_add(logits + row * row_stride + token, added, mask=is_edit, sem="relaxed")


def change_logits(logits: torch.Tensor, changes: LogitChanges) -> None:
    """Change logits [R, V] float32 in place.

    Raises:
        TypeError, ValueError: tensors have other types or shapes than `LogitChanges` says.
    """
    if changes.masks is not None:
        _forbid(logits, changes.masks)
    if isinstance(changes.edits, LogitEdits):
        _edit(logits, changes.edits)


def _forbid(logits: torch.Tensor, masks: LogitMasks) -> None:
    num_rows, vocab_size = logits.shape
    bitmask = masks.bitmask
    check_vector("mask_of_row", masks.mask_of_row, torch.int64, num_rows)
    if bitmask.dtype is not torch.int32:
        raise TypeError(f"bitmask is {bitmask.dtype}; it must be torch.int32")
    has_gaps = len(bitmask) > 0 and bitmask.stride(1) != 1  # what is empty may have any strides
    if bitmask.dim() != 2 or bitmask.shape[1] * 32 < vocab_size or has_gaps:
        raise ValueError(
            f"bitmask is {tuple(bitmask.shape)} with strides {bitmask.stride()}; it must be two-dimensional, "
            f"have {-(-vocab_size // 32)} columns or more, and a row's numbers adjacent"
        )
    if num_rows and len(bitmask):
        part = min(next_power_of_2(vocab_size), _PART)
        _forbid_kernel[(num_rows, -(-vocab_size // part))](
            logits, bitmask, masks.mask_of_row, vocab_size, logits.stride(0), bitmask.stride(0), PART=part
        )


def _edit(logits: torch.Tensor, edits: LogitEdits) -> None:
    numbers = edits.numbers
    check_vector("tokens_before", edits.tokens_before, torch.int64, len(logits))
    if numbers.dtype is not torch.float64:
        raise TypeError(f"numbers is {numbers.dtype}; it must be torch.float64")
    if numbers.dim() != 2 or len(numbers) != NUM_EDIT_NUMBERS or not numbers.is_contiguous():
        raise ValueError(
            f"numbers is {tuple(numbers.shape)} with strides {numbers.stride()}; it must be "
            f"[{NUM_EDIT_NUMBERS}, any], and contiguous"
        )
    num_edits = numbers.shape[1]
    if len(logits) and num_edits:
        _edit_kernel[(-(-num_edits // _EDITS),)](
            logits,
            numbers,
            edits.tokens_before,
            num_edits,
            logits.shape[1],
            logits.stride(0),
            PART=_EDITS,
        )
