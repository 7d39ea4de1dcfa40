"""Layers with a state in Triton: the tokens of a sequence in order, each by the same operations.

So neither chunks nor other sequences change a bit. A program has a part of a head's memory, and keeps it from
token to token. What is written as two operations is never fused to one (`enable_fp_fusion`), because a
compiler might do that differently in the copies that it makes of a loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.layers import recurrence
from quire.kernels.triton.device import await_previous, loop_end, rounded
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.rows import activated

SEQUENCE_FIELDS = tl.constexpr(5)
"""Of a sequence: the number of its state, -1 if it has none; whether it has tokens before the step; its first
row, the end of its rows, and the end of those that the state takes in."""

_UNIT_EPS, _LINEAR_FROM = tl.constexpr(recurrence.UNIT_EPS), tl.constexpr(recurrence.LINEAR_FROM)


@triton.jit
def _softplus(time):
    is_linear = time > _LINEAR_FROM
    power = tl.exp(tl.where(is_linear, 0.0, time))
    # log(1 + power), exact where little is left of it: both the logarithm and what it is of are of 1 + power.
    more = 1.0 + power
    added = more - 1.0
    logarithm = tl.where(added == 0.0, power, tl.log(more) * (power / tl.where(added == 0.0, 1.0, added)))
    return tl.where(is_linear, time, logarithm)


@triton.jit
def _unit(vector):
    """Return a vector of length 1."""
    return vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + _UNIT_EPS)


@triton.jit
def _conv_input(
    rows, row_stride, kept, first, place, feature, is_feature, has_state, num_features, TAPS: tl.constexpr
):
    """Return the input `place` tokens behind the sequence's first one of the step, or before it."""
    row = rows + (first + place).to(tl.int64) * row_stride + feature
    of_step = tl.load(row, mask=is_feature & (place >= 0), other=0.0)
    before = kept + (TAPS - 1 + place) * num_features + feature
    of_state = tl.load(before, mask=is_feature & (place < 0) & has_state, other=0.0)
    return tl.where(place >= 0, of_step, of_state)


@kernel()
def conv_kernel(
    rows,
    row_stride,
    weight,
    bias,
    state,
    state_stride,
    sequences,
    sequence_of_row,
    out,
    num_features,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve some features of a row; grid (rows, blocks of features)."""
    await_previous()
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < num_features
    fields = sequences + tl.load(sequence_of_row + row) * SEQUENCE_FIELDS
    kept = state + tl.load(fields).to(tl.int64) * state_stride
    has_state, first = tl.load(fields + 1) != 0, tl.load(fields + 2)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = row - first + tap - (TAPS - 1)
        value = _conv_input(
            rows, row_stride, kept, first, place, feature, is_feature, has_state, num_features, TAPS
        )
        factor = tl.load(weight + tap * num_features + feature, mask=is_feature, other=0.0)
        total += value.to(tl.float32) * factor
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0)
    if HAS_SILU:
        total = activated(total, "silu")
    result_at = out + row.to(tl.int64) * num_features + feature
    tl.store(result_at, rounded(total, out.dtype.element_ty), mask=is_feature)


@kernel()
def keep_inputs_kernel(
    rows, row_stride, state, state_stride, sequences, num_features, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Bring the inputs that states keep up to date, once all rows are convolved.

    The grid is (sequences, blocks of features). A thread has the same features of all inputs, and each input
    is read before its place is taken.
    """
    await_previous()
    fields = sequences + tl.program_id(0) * SEQUENCE_FIELDS
    number = tl.load(fields)
    if number < 0:
        return
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_feature = feature < num_features
    kept = state + number.to(tl.int64) * state_stride
    has_state, first = tl.load(fields + 1) != 0, tl.load(fields + 2)
    num_taken_in = tl.load(fields + 4) - first
    for place in tl.static_range(TAPS - 1):
        source = num_taken_in + place - (TAPS - 1)
        value = _conv_input(
            rows, row_stride, kept, first, source, feature, is_feature, has_state, num_features, TAPS
        )
        tl.store(kept + place * num_features + feature, value, mask=is_feature)


@triton.jit
def _memory_of(
    state,
    state_stride,
    fields,
    head,
    column,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return where a part of a head's memory [KEYS, columns] is, which of its numbers are, and them."""
    key = tl.arange(0, KEYS)
    at = state + tl.load(fields).to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
    at = at + (key[:, None] * VALUE_DIM + column[None, :])
    is_number = (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    return at, is_number, tl.load(at, mask=is_number & (tl.load(fields + 1) != 0), other=0.0)


@kernel()
def delta_rule_kernel(
    qkv,
    row_stride,
    strengths,
    strength_stride,
    times,
    time_stride,
    decay,
    time_bias,
    state,
    state_stride,
    sequences,
    out,
    max_strength,
    query_scale,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TIMES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Take in the tokens of a sequence; grid (sequences, value heads, blocks of a head's values)."""
    await_previous()
    fields = sequences + tl.program_id(0) * SEQUENCE_FIELDS
    head = tl.program_id(1)
    first, end, state_end = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    feature = tl.arange(0, KEYS)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_feature, is_column = feature < KEY_DIM, column < VALUE_DIM
    memory_at, is_number, memory = _memory_of(
        state, state_stride, fields, head, column, KEY_DIM, VALUE_DIM, KEYS
    )
    # One time of the head, or one of each feature of its keys.
    number = tl.minimum(feature, TIMES - 1)
    head_decay, head_bias = tl.load(decay + head), tl.load(time_bias + head * TIMES + number)
    query_at = qkv + first.to(tl.int64) * row_stride + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM + feature
    value_at = qkv + first.to(tl.int64) * row_stride + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + column
    strength_at = strengths + first.to(tl.int64) * strength_stride + head
    time_at = times + first.to(tl.int64) * time_stride + head * TIMES + number
    out_at = out + first.to(tl.int64) * (NUM_VALUES * VALUE_DIM) + head * VALUE_DIM + column
    for token in range(loop_end(first), loop_end(end)):
        query = _unit(tl.load(query_at, mask=is_feature, other=0.0).to(tl.float32))
        key = _unit(tl.load(query_at + NUM_KEYS * KEY_DIM, mask=is_feature, other=0.0).to(tl.float32))
        value = tl.load(value_at, mask=is_column, other=0.0).to(tl.float32)
        strength = 1.0 + tl.exp(-tl.load(strength_at).to(tl.float32))  # over which it is 1
        time = _softplus(tl.load(time_at).to(tl.float32) + head_bias)
        memory *= tl.exp(head_decay * time)[:, None]
        recalled = tl.sum(memory * key[:, None], axis=0)
        memory += key[:, None] * (max_strength * (value - recalled) / strength)[None, :]
        result = tl.sum(memory * (query * query_scale)[:, None], axis=0)
        tl.store(out_at, rounded(result, out.dtype.element_ty), mask=is_column)
        if token + 1 == state_end:
            tl.store(memory_at, memory, mask=is_number)
        query_at += row_stride
        value_at += row_stride
        strength_at += strength_stride
        time_at += time_stride
        out_at += NUM_VALUES * VALUE_DIM


@kernel()
def scan_kernel(
    inputs,
    row_stride,
    times,
    time_stride,
    decay,
    time_bias,
    skip,
    state,
    state_stride,
    sequences,
    out,
    out_stride,
    least_time,
    most_time,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Take in the tokens of a sequence; grid (sequences, heads, blocks of a head's values)."""
    await_previous()
    fields = sequences + tl.program_id(0) * SEQUENCE_FIELDS
    head = tl.program_id(1)
    first, end, state_end = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    feature = tl.arange(0, KEYS)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_feature, is_column = feature < STATE_SIZE, column < HEAD_DIM
    memory_at, is_number, memory = _memory_of(
        state, state_stride, fields, head, column, STATE_SIZE, HEAD_DIM, KEYS
    )
    head_decay, head_bias = tl.load(decay + head), tl.load(time_bias + head)
    head_skip = tl.load(skip + head)
    value_at = inputs + first.to(tl.int64) * row_stride + head * HEAD_DIM + column
    key_at = inputs + first.to(tl.int64) * row_stride + NUM_HEADS * HEAD_DIM
    key_at = key_at + head // (NUM_HEADS // NUM_GROUPS) * STATE_SIZE + feature
    time_at = times + first.to(tl.int64) * time_stride + head
    out_at = out + first.to(tl.int64) * out_stride + head * HEAD_DIM + column
    for token in range(loop_end(first), loop_end(end)):
        value = tl.load(value_at, mask=is_column, other=0.0).to(tl.float32)
        key = tl.load(key_at, mask=is_feature, other=0.0).to(tl.float32)
        query = tl.load(key_at + NUM_GROUPS * STATE_SIZE, mask=is_feature, other=0.0).to(tl.float32)
        time = _softplus(tl.load(time_at).to(tl.float32) + head_bias)
        time = tl.where(time < least_time, least_time, tl.where(time > most_time, most_time, time))
        memory *= tl.exp(head_decay * time)
        memory += key[:, None] * (value * time)[None, :]
        result = tl.sum(memory * query[:, None], axis=0) + value * head_skip
        tl.store(out_at, rounded(result, out.dtype.element_ty), mask=is_column)
        if token + 1 == state_end:
            tl.store(memory_at, memory, mask=is_number)
        value_at += row_stride
        key_at += row_stride
        time_at += time_stride
        out_at += out_stride
