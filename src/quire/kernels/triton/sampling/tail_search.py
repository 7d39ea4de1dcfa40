"""Drawing from a row whose likeliest tokens do not decide it, in Triton, without a sort and without the host.

What is kept of a row ends with a token of some key (`key_search`), and so does what is up to the draw; tokens
of one key are in the order of their ids. Only rows that need it are searched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.sampling.token_choice import RowDraws
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import await_previous
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.sampling.key_search import (
    SEARCH_PART,
    SEARCH_STEPS,
    SEARCH_WARPS,
    find_key,
    key_of,
    logit_of,
    relative_weight,
)

TO_SEARCH = tl.constexpr(-2)
"""In the place of a token id: that of the row is to be searched for."""

_ABOVE_KEYS = tl.constexpr(2**40)


@kernel(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "uniforms"])
def _search_kernel(
    logits,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    token_ids,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
):
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(token_ids + row) != TO_SEARCH:
        return
    row_at = logits + row * row_stride
    maximum, temperature = tl.load(maxima + row), tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    counts = tl.full((PART,), 0, tl.int32)
    masses = tl.full((PART,), 0, tl.float64)
    lowest_keys = tl.full((PART,), 0, tl.int64) + _ABOVE_KEYS
    for start in range(0, VOCAB_SIZE, PART):
        place = start + tl.arange(0, PART)
        found = tl.load(row_at + place, mask=place < VOCAB_SIZE, other=float("-inf"))
        weights = relative_weight(found, maximum, temperature)
        passes = (weights > 0.0) & (weights >= min_p)
        counts += passes.to(tl.int32)
        masses += tl.where(passes, weights, 0.0)
        lowest_keys = tl.minimum(lowest_keys, tl.where(passes, key_of(found), _ABOVE_KEYS))
    lowest = tl.min(lowest_keys, axis=0)
    num_passing = tl.sum(counts, axis=0).to(tl.int64)
    mass = tl.sum(masses, axis=0)

    # What is kept ends with token `last` of those whose key is `last_key`, in the order of their ids.
    num_kept, last_key, last = num_passing, lowest, tl.full((), 0, tl.int64)
    top_k = tl.load(top_ks + row)
    if top_k < num_passing:
        last_key, before, mass_before, num_equal = find_key(
            row_at, maximum, temperature, lowest, num_passing, (top_k - 1).to(tl.float64),
            BY_COUNT=True, OR_EQUAL=False, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
        )  # fmt: skip
        num_kept, last = top_k, top_k - 1 - before
        mass = _mass_through(last_key, last, mass_before, maximum, temperature)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        target = top_p * mass
        key, before, mass_before, num_equal = find_key(
            row_at, maximum, temperature, lowest, num_passing, target,
            BY_COUNT=False, OR_EQUAL=True, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
        )  # fmt: skip
        weight = relative_weight(logit_of(key), maximum, temperature)
        place = _bounded(tl.ceil((target - mass_before) / weight) - 1.0, num_equal)
        if before + place + 1 < num_kept:
            num_kept, last_key, last = before + place + 1, key, place
            mass = _mass_through(key, place, mass_before, maximum, temperature)
    target = tl.load(uniforms + row) * mass
    key, before, mass_before, num_equal = find_key(
        row_at, maximum, temperature, lowest, num_passing, target,
        BY_COUNT=False, OR_EQUAL=False, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
    )  # fmt: skip
    weight = relative_weight(logit_of(key), maximum, temperature)
    place = _bounded(tl.floor((target - mass_before) / weight), num_equal)
    # The last bit of a mass depends on the order of its sum, which may push the draw past the edge.
    is_past_edge = before + place >= num_kept
    key, place = tl.where(is_past_edge, last_key, key), tl.where(is_past_edge, last, place)
    tl.store(token_ids + row, _token_at(row_at, key, place, VOCAB_SIZE, PART))


@triton.jit
def _mass_through(key, place, mass_before, maximum, temperature):
    """Return the mass of the tokens up to number `place` of those that have a key."""
    return mass_before + (place + 1).to(tl.float64) * relative_weight(logit_of(key), maximum, temperature)


@triton.jit
def _bounded(place, count):
    """Return a place, float64, as a whole number from 0 to `count` - 1."""
    return tl.minimum(tl.maximum(place, 0.0), (count - 1).to(tl.float64)).to(tl.int64)


@triton.jit
def _token_at(row_at, key, number, VOCAB_SIZE: tl.constexpr, PART: tl.constexpr):
    """Return the id of token `number` of those whose key is `key`."""
    before = tl.full((), 0, tl.int64)
    token = tl.full((), 0, tl.int64)
    for start in range(0, VOCAB_SIZE, PART):
        place = start + tl.arange(0, PART)
        found = tl.load(row_at + place, mask=place < VOCAB_SIZE, other=float("-inf"))
        has_key = key_of(found) == key
        count = tl.sum(has_key.to(tl.int32), axis=0)
        if (number >= before) & (number < before + count):
            is_it = has_key & (before + tl.cumsum(has_key.to(tl.int32), axis=0) - 1 == number)
            token = tl.sum(tl.where(is_it, place, 0), axis=0).to(tl.int64)
        before += count
    return token


def search_tails(
    logits: torch.Tensor, maxima: torch.Tensor, draws: RowDraws, token_ids: torch.Tensor
) -> None:
    """Put what is drawn in the place of `TO_SEARCH` in `token_ids`.

    Args:
        logits: [R, V] float32.
        maxima: [R] float32, the largest logit of each row.
        draws: how each row draws.
        token_ids: [R] int64, changed in place.
    """
    num_rows, vocab_size = logits.shape
    if num_rows:
        _search_kernel[(num_rows,)](
            logits, maxima, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniforms,
            token_ids, logits.stride(0),
            VOCAB_SIZE=vocab_size, PART=min(next_power_of_2(vocab_size), SEARCH_PART),
            STEPS=SEARCH_STEPS, num_warps=SEARCH_WARPS,
        )  # fmt: skip
