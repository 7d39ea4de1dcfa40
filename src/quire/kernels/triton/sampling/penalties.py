"""Penalties in Triton, with the bits of `quire.kernels.sampling.host_choice`."""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.sampling.seen_tokens import in_prompt
from quire.kernels.sampling.token_choice import RowPenalties
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous, is_interpreted, loop_end
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.tensors import check_vector

_PART = 1 << 16 if is_interpreted else 4096  # logits of a program


@kernel(
    do_not_specialize=["num_drafts"],
    do_not_specialize_on_alignment=["seen_of_row", "drafts", "repetitions", "frequencies", "presences"],
)
def _penalize_kernel(
    logits,
    seen,
    seen_of_row,
    drafts,
    repetitions,
    frequencies,
    presences,
    vocab_size,
    row_stride,
    num_drafts,
    PART: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    seen_row = tl.load(seen_of_row + row)
    if seen_row < 0:
        return
    place = tl.program_id(1) * PART + tl.arange(0, PART)
    is_token = place < vocab_size
    counts = tl.load(seen + seen_row * vocab_size + place, mask=is_token, other=0).to(tl.int32)
    if drafts is not None:
        for number in range(loop_end(num_drafts)):
            counts += (place == tl.load(drafts + row * num_drafts + number)).to(tl.int32)
    is_seen = counts > 0
    counts = counts & (IN_PROMPT - 1)
    at = logits + row * row_stride + place
    found = tl.load(at, mask=is_seen, other=0.0)
    repetition = tl.load(repetitions + row)
    divided = tl.div_rn(found, tl.zeros_like(found) + repetition)
    penalized = tl.where(found > 0.0, divided, found * repetition)
    penalized -= tl.load(frequencies + row) * counts.to(tl.float32)
    penalized -= tl.load(presences + row) * (counts > 0).to(tl.float32)
    tl.store(at, penalized, mask=is_seen)


def penalize(logits: torch.Tensor, penalties: RowPenalties) -> None:
    """Change logits [R, V] float32 in place.

    Raises:
        TypeError, ValueError: tensors have other types or shapes than `RowPenalties` says.
    """
    num_rows, vocab_size = logits.shape
    check_vector("seen_of_row", penalties.seen_of_row, torch.int64, num_rows)
    for name in ("repetition", "frequency", "presence"):
        check_vector(name, getattr(penalties, name), torch.float32, num_rows)
    seen = penalties.seen
    if seen.dtype not in (torch.int16, torch.int32):
        raise TypeError(f"seen is {seen.dtype}; it must be torch.int16 or torch.int32")
    if seen.dim() != 2 or seen.shape[1] != vocab_size or not seen.is_contiguous():
        raise ValueError(
            f"seen is {tuple(seen.shape)} with strides {seen.stride()}; it must have {vocab_size} columns "
            "and be contiguous"
        )
    drafts = penalties.drafts
    if drafts is not None and (
        drafts.dtype is not torch.int64 or drafts.shape[:-1] != (num_rows,) or not drafts.is_contiguous()
    ):
        raise ValueError(
            f"drafts are {drafts.dtype} {tuple(drafts.shape)}; they must be int64 [{num_rows}, any number] "
            "and contiguous"
        )
    if num_rows:
        part = min(next_power_of_2(vocab_size), _PART)
        _penalize_kernel[(num_rows, -(-vocab_size // part))](
            logits, seen, penalties.seen_of_row, drafts, penalties.repetition, penalties.frequency,
            penalties.presence, vocab_size, logits.stride(0), 0 if drafts is None else drafts.shape[1],
            PART=part, IN_PROMPT=in_prompt(seen.dtype),
            enable_fp_fusion=False,  # a product is rounded before it is subtracted, as on the host
        )  # fmt: skip
