"""Choosing the next token of each row of logits in Triton, as `quire.kernels.sampling.host_choice` does.

Nothing waits for the device, and what is launched depends on the number of rows and the vocabulary only.
Rows are decided from their likeliest tokens, and the few that cannot be are searched (`tail_search`).
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl
from typing_extensions import override

from quire.kernels.bounds import MAX_HEAD_TOKENS
from quire.kernels.sampling.token_choice import LogitChanges, RowDraws, RowLogprobs, RowPenalties, TokenChoice
from quire.kernels.triton.device import await_previous
from quire.kernels.triton.kernel import compiles_only, kernel
from quire.kernels.triton.sampling import row_scans
from quire.kernels.triton.sampling.key_search import relative_weight
from quire.kernels.triton.sampling.logit_changes import change_logits
from quire.kernels.triton.sampling.logprobs import row_logprobs
from quire.kernels.triton.sampling.penalties import penalize
from quire.kernels.triton.sampling.tail_search import TO_SEARCH, search_tails
from quire.kernels.triton.tensors import check_logits, check_vector
from quire.step import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_BLOCK = 1024  # tokens of a program


@kernel(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "uniforms"])
def _decide_kernel(
    head_logits,
    head_ids,
    head_counts,
    head_is_complete,
    sums,
    best_ids,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    token_ids,
    vocab_size,
    WIDTH: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    maximum, temperature = tl.load(maxima + row), tl.load(temperatures + row)
    if (maximum != maximum) | (tl.abs(maximum) == float("inf")):
        tl.store(token_ids + row, _NO_TOKEN)
    elif temperature <= 0.0:
        tl.store(token_ids + row, tl.load(best_ids + row))
    else:
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        num_head, is_complete = tl.load(head_counts + row), tl.load(head_is_complete + row) != 0
        place = tl.arange(0, WIDTH)
        weights = relative_weight(tl.load(head_logits + row * WIDTH + place), maximum, temperature)
        cumulative = tl.cumsum(weights, axis=0)
        num_passing = tl.sum((weights >= min_p).to(tl.int64), axis=0)
        num_kept = tl.minimum(num_passing, top_k)
        reaches_end = (num_passing < num_head) | (top_k <= num_head) | is_complete
        keeps_all = (top_k >= vocab_size) & (min_p == 0.0)
        # The mass of all tokens that min-p and top-k keep is known if the head has them, or if all are kept.
        mass = tl.sum(tl.where(place == num_kept - 1, cumulative, 0.0), axis=0)
        mass = tl.where(keeps_all & (not reaches_end), tl.load(sums + row), mass)
        is_decided = reaches_end | keeps_all
        if top_p < 1.0:
            num_nucleus = 1 + tl.sum((cumulative < top_p * mass).to(tl.int64), axis=0)
            is_decided = is_decided & (reaches_end | (num_nucleus <= num_head))
            num_kept = tl.minimum(num_kept, num_nucleus)
            mass = tl.sum(tl.where(place == num_kept - 1, cumulative, 0.0), axis=0)
        index = tl.sum((cumulative <= tl.load(uniforms + row) * mass).to(tl.int64), axis=0)
        is_decided = is_decided & (index < num_head)
        # Sums in parallel may fall by a last bit from one place to the next.
        index = tl.minimum(index, num_kept - 1)
        token = tl.sum(tl.where(place == index, tl.load(head_ids + row * WIDTH + place), 0), axis=0)
        tl.store(token_ids + row, tl.where(is_decided, token, TO_SEARCH))


@kernel(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["encoded", "token_ids"])
def _input_ids_kernel(encoded, last, token_ids, num_tokens, BLOCK: tl.constexpr):
    await_previous()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(encoded + place, mask=place < num_tokens, other=0)
    last_of_slot = tl.load(last + (-1 - code), mask=code < 0, other=0)
    tl.store(token_ids + place, tl.where(code < 0, last_of_slot, code), mask=place < num_tokens)


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids", "slots"])
def _keep_last_kernel(token_ids, slots, last, num_rows, BLOCK: tl.constexpr):
    await_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    token = tl.load(token_ids + row, mask=is_row, other=0)
    tl.store(last + tl.load(slots + row, mask=is_row, other=0), tl.maximum(token, 0), mask=is_row)


class TritonChoice(TokenChoice):
    """Takes logits whose rows' numbers are adjacent; where nothing is drawn or changed, it scans them once.

    Raises:
        TypeError, ValueError: tensors have other types or shapes than the interface says.
    """

    @override
    def choose(
        self,
        logits: torch.Tensor,
        draws: RowDraws | None = None,
        changes: LogitChanges | None = None,
        penalties: RowPenalties | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check(logits, draws)
        if changes is None and penalties is None:
            token_ids, maxima = _choose(logits, draws)
        else:
            token_ids, maxima = _choose_changed(logits, draws, changes, penalties)
        if compiles_only():  # any numbers, with which a draft model would go on
            token_ids = torch.zeros_like(token_ids)
        return token_ids, maxima

    @override
    def input_ids(self, encoded: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        token_ids = torch.empty_like(encoded)
        if len(encoded):
            _input_ids_kernel[(-(-len(encoded) // _BLOCK),)](
                encoded, last, token_ids, len(encoded), BLOCK=_BLOCK
            )
        if compiles_only():
            token_ids.zero_()
        return token_ids

    @override
    def keep_last(self, token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor) -> None:
        if len(slots):
            _keep_last_kernel[(-(-len(slots) // _BLOCK),)](token_ids, slots, last, len(slots), BLOCK=_BLOCK)

    @override
    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        check_logits(logits)
        return row_logprobs(logits, chosen, num_likeliest, rows)


def _choose(logits: torch.Tensor, draws: RowDraws | None) -> tuple[torch.Tensor, torch.Tensor]:
    likeliest, maxima = row_scans.largest(logits, needs_finite=draws is None)
    if draws is None:
        return likeliest, maxima
    return _draw(logits, draws, likeliest, maxima), maxima


def _choose_changed(
    logits: torch.Tensor,
    draws: RowDraws | None,
    changes: LogitChanges | None,
    penalties: RowPenalties | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    likeliest, maxima = _choose(logits, None)
    if changes is not None:
        change_logits(logits, changes)
    if penalties is not None:
        penalize(logits, penalties)
    token_ids, changed_maxima = _choose(logits, draws)
    # Before the changes, the row had no token, or it has none after them and no mask.
    has_none = token_ids == NO_TOKEN
    if changes is not None and changes.masks is not None:
        has_none &= changes.masks.mask_of_row < 0
    keeps_likeliest = (likeliest == NO_TOKEN) | has_none
    return (
        torch.where(keeps_likeliest, likeliest, token_ids),
        torch.where(keeps_likeliest, maxima, changed_maxima),
    )


def _draw(
    logits: torch.Tensor, draws: RowDraws, best_ids: torch.Tensor, maxima: torch.Tensor
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty_like(best_ids)
    if not num_rows:
        return token_ids
    numbers = torch.arange(num_rows, device=logits.device)
    drawn = numbers.masked_fill((draws.temperature <= 0) | ~maxima.isfinite(), -1)
    head_logits, head_ids, head_counts, is_complete = row_scans.likeliest(logits, drawn)
    needs_no_sum = (draws.top_k < vocab_size) | (draws.min_p > 0) | is_complete
    sums = row_scans.sum_exp(logits, maxima, draws.temperature, drawn.masked_fill(needs_no_sum, -1))
    _decide_kernel[(num_rows,)](
        head_logits, head_ids, head_counts, is_complete, sums, best_ids, maxima, draws.temperature,
        draws.top_k, draws.top_p, draws.min_p, draws.uniforms, token_ids, vocab_size, WIDTH=MAX_HEAD_TOKENS,
    )  # fmt: skip
    search_tails(logits, maxima, draws, token_ids)
    return token_ids


def _check(logits: torch.Tensor, draws: RowDraws | None) -> None:
    check_logits(logits)
    if draws is None:
        return
    for field in dataclasses.fields(draws):
        dtype = torch.int64 if field.name == "top_k" else torch.float64
        check_vector(field.name, getattr(draws, field.name), dtype, len(logits))
