"""Drawing from a row whose likeliest tokens do not decide it, in Triton, without a sort and without the host.

Logits are mapped to whole numbers of the same order, *keys*, and the key of the token that is looked for is
found between two others: each pass over the row counts the tokens that reach each of some keys between
them, and adds up their mass. Tokens of the key that is found are ordered by id. Only rows that need it are
searched; a row has one program, and sums have one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.token_choice import RowDraws
from quire.kernels.triton.device import is_interpreted

TO_SEARCH = tl.constexpr(-2)
"""In the place of a token id: that of the row is to be searched for."""

_PART = 1 << 12 if is_interpreted else 512  # logits that are looked at together
_NUM_WARPS = 16
_STEPS = 256 if is_interpreted else 8  # keys between two that are tried in a pass
_MOST = tl.constexpr(2**40)  # above all keys


@triton.jit
def relative_weight(logits, maximum, temperature):
    """Return probabilities relative to that of the row's likeliest token, in float64."""
    return tl.exp((logits.to(tl.float64) - maximum.to(tl.float64)) / temperature)


@triton.jit
def _key_of(logits):
    """Return whole numbers in the order of the logits, one for both zeros."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _logit_of(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _steps_between(low, high, is_even, STEPS: tl.constexpr):
    """Return rising keys above `low` and up to `high`: evenly spaced, or those of evenly spaced logits.

    Logits are spread evenly rather than their keys, most of which are of numbers next to 0; but where one
    logit is far from all others, only even steps of keys have an end.
    """
    step = tl.arange(0, STEPS).to(tl.int64) + 1
    by_key = low + step * ((high - low + STEPS) // (STEPS + 1))
    lowest = _logit_of(low).to(tl.float64)
    width = _logit_of(high).to(tl.float64) - lowest
    by_logit = _key_of((lowest + width * step.to(tl.float64) / (STEPS + 1)).to(tl.float32))
    return tl.minimum(tl.maximum(tl.where(is_even, by_key, by_logit), low + 1), high)


@triton.jit
def _search(
    row_at,
    maximum,
    temperature,
    low,
    count_at_low,
    target,
    BY_COUNT: tl.constexpr,
    OR_EQUAL: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Find the largest key at which what the tokens from it on have is more than `target`, or as much.

    Args:
        low: the least key that is kept, and the result if there is none.
        count_at_low: how many tokens reach it.
        BY_COUNT: what tokens have is their number rather than their mass.

    Returns:
        The key, the number and the mass of the tokens above it, and the number of its own.
    """
    high = _key_of(maximum) + 1
    count_at_high = tl.full((), 0, tl.int64)
    mass_at_high = tl.full((), 0, tl.float64)
    passes = tl.full((), 0, tl.int32)
    while high - low > 1:
        steps = _steps_between(low, high, passes % 2 == 1, STEPS)
        counts = tl.full((PART, STEPS), 0, tl.int32)
        masses = tl.full((PART, STEPS), 0, tl.float64)
        for start in range(0, VOCAB_SIZE, PART):
            place = start + tl.arange(0, PART)
            found = tl.load(row_at + place, mask=place < VOCAB_SIZE, other=float("-inf"))
            key = _key_of(found)
            is_between = (key >= low) & (key < high)
            if tl.max(is_between.to(tl.int32), axis=0) > 0:
                reaches = is_between[:, None] & (key[:, None] >= steps[None, :])
                counts += reaches.to(tl.int32)
                weights = relative_weight(found, maximum, temperature)
                masses += tl.where(reaches, weights[:, None], 0.0)
        count = count_at_high + tl.sum(counts, axis=0).to(tl.int64)
        mass = mass_at_high + tl.sum(masses, axis=0)
        measure = count.to(tl.float64) if BY_COUNT else mass
        is_enough = (measure >= target if OR_EQUAL else measure > target) & (steps < high)
        # Number and mass fall from step to step, so the last step with enough has the least of such.
        low = tl.max(tl.where(is_enough, steps, low), axis=0)
        count_at_low = tl.min(tl.where(is_enough, count, count_at_low), axis=0)
        is_short = (steps < high) & ~is_enough
        count_at_high = tl.max(tl.where(is_short, count, count_at_high), axis=0)
        mass_at_high = tl.max(tl.where(is_short, mass, mass_at_high), axis=0)
        high = tl.min(tl.where(is_short, steps, high), axis=0)
        passes += 1
    return low, count_at_high, mass_at_high, count_at_low - count_at_high


@triton.jit
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
    row = tl.program_id(0).to(tl.int64)
    if tl.load(token_ids + row) != TO_SEARCH:
        return
    row_at = logits + row * row_stride
    maximum, temperature = tl.load(maxima + row), tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    counts = tl.full((PART,), 0, tl.int32)
    masses = tl.full((PART,), 0, tl.float64)
    lowest_keys = tl.full((PART,), 0, tl.int64) + _MOST
    for start in range(0, VOCAB_SIZE, PART):
        place = start + tl.arange(0, PART)
        found = tl.load(row_at + place, mask=place < VOCAB_SIZE, other=float("-inf"))
        weights = relative_weight(found, maximum, temperature)
        passes = (weights > 0.0) & (weights >= min_p)
        counts += passes.to(tl.int32)
        masses += tl.where(passes, weights, 0.0)
        lowest_keys = tl.minimum(lowest_keys, tl.where(passes, _key_of(found), _MOST))
    lowest = tl.min(lowest_keys, axis=0)
    num_passing = tl.sum(counts, axis=0).to(tl.int64)
    mass = tl.sum(masses, axis=0)

    # What is kept ends with token `last` of those whose key is `last_key`, in the order of their ids.
    num_kept, last_key, last = num_passing, lowest, tl.full((), 0, tl.int64)
    top_k = tl.load(top_ks + row)
    if top_k < num_passing:
        last_key, before, mass_before, num_equal = _search(
            row_at, maximum, temperature, lowest, num_passing, (top_k - 1).to(tl.float64),
            BY_COUNT=True, OR_EQUAL=False, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
        )  # fmt: skip
        num_kept, last = top_k, top_k - 1 - before
        mass = _mass_through(last_key, last, mass_before, maximum, temperature)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        target = top_p * mass
        key, before, mass_before, num_equal = _search(
            row_at, maximum, temperature, lowest, num_passing, target,
            BY_COUNT=False, OR_EQUAL=True, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
        )  # fmt: skip
        weight = relative_weight(_logit_of(key), maximum, temperature)
        place = _bounded(tl.ceil((target - mass_before) / weight) - 1.0, num_equal)
        if before + place + 1 < num_kept:
            num_kept, last_key, last = before + place + 1, key, place
            mass = _mass_through(key, place, mass_before, maximum, temperature)
    target = tl.load(uniforms + row) * mass
    key, before, mass_before, num_equal = _search(
        row_at, maximum, temperature, lowest, num_passing, target,
        BY_COUNT=False, OR_EQUAL=False, VOCAB_SIZE=VOCAB_SIZE, PART=PART, STEPS=STEPS,
    )  # fmt: skip
    weight = relative_weight(_logit_of(key), maximum, temperature)
    place = _bounded(tl.floor((target - mass_before) / weight), num_equal)
    # The last bit of a mass depends on the order of its sum, which may push the draw past the edge.
    is_past_edge = before + place >= num_kept
    key, place = tl.where(is_past_edge, last_key, key), tl.where(is_past_edge, last, place)
    tl.store(token_ids + row, _token_at(row_at, key, place, VOCAB_SIZE, PART))


@triton.jit
def _mass_through(key, place, mass_before, maximum, temperature):
    """Return the mass of the tokens up to number `place` of those that have a key."""
    return mass_before + (place + 1).to(tl.float64) * relative_weight(_logit_of(key), maximum, temperature)


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
        has_key = _key_of(found) == key
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
            VOCAB_SIZE=vocab_size, PART=min(int(triton.next_power_of_2(vocab_size)), _PART),
            STEPS=_STEPS, num_warps=_NUM_WARPS,
        )  # fmt: skip
