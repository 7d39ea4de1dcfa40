"""Finding a token by how many, or how much mass, is before it in a row of logits, in Triton, without a sort.

Logits are mapped to whole numbers of the same order, *keys*, and the key of the token that is looked for is
found between two others: each pass over the row counts the tokens that reach each of some keys between
them, and adds up their mass. A row has one program, and sums have one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.device import is_interpreted

SEARCH_PART = 1 << 12 if is_interpreted else 512  # logits that are looked at together
SEARCH_STEPS = 256 if is_interpreted else 8  # keys between two that are tried in a pass
SEARCH_WARPS = 16


@triton.jit
def relative_weight(logits, maximum, temperature):
    """Return probabilities relative to that of the row's likeliest token, in float64."""
    return tl.exp((logits.to(tl.float64) - maximum.to(tl.float64)) / temperature)


@triton.jit
def key_of(logits):
    """Return whole numbers in the order of the logits, one for both zeros."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def logit_of(key):
    """Return the logit of a key."""
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
    lowest = logit_of(low).to(tl.float64)
    width = logit_of(high).to(tl.float64) - lowest
    by_logit = key_of((lowest + width * step.to(tl.float64) / (STEPS + 1)).to(tl.float32))
    return tl.minimum(tl.maximum(tl.where(is_even, by_key, by_logit), low + 1), high)


@triton.jit
def find_key(
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
    high = key_of(maximum) + 1
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
            key = key_of(found)
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
