"""Layers with a state on the native kernels: what is checked, once for each step and for each form."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.cpu import _native
from quire.kernels.cpu.programs import refuse_recording
from quire.kernels.cpu.tensors import (
    Form,
    address,
    check_contiguous,
    check_on_cpu,
    check_vector,
    checked_once,
    float_type,
    form_of,
    is_contiguous,
    row_stride,
    written_row_stride,
)
from quire.kernels.devices.device import HOST
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads, check_states

_ROWS = "cpu recurrence"  # among a batch's plans


class StepRows:
    """The sequences of a step, and their states; raises as `check_states` does."""

    def __init__(self, batch: AttentionBatch) -> None:
        if batch.step_arrays is None:
            refuse_recording("a step whose arrays are its own")
            self._arrays = tuple(map(torch.from_numpy, _row_arrays(batch).arrays))
        else:
            self._arrays = batch.on_device(_ROWS, _arrays_to_replay, HOST).arrays
        numbers, ends = (each.numpy() for each in self._arrays[:2])
        size = len(ends)
        self.num_tokens = int(ends[-1]) if size else 0
        self.num_states = int(numbers.max(initial=-1)) + 1  # at least
        self.native = _native.SequenceRows(size, *(each.data_ptr() for each in self._arrays))


def _row_arrays(batch: AttentionBatch) -> HostArrays:
    """Return states, ends of rows and of those that states take in, and tokens before the step."""
    check_states(batch)
    states = batch.states
    assert states is not None
    ends = np.cumsum(batch.num_tokens)
    state_ends = ends - batch.num_tokens + batch.num_state_tokens
    return HostArrays((states.numbers, ends, state_ends, batch.num_cached_tokens))


def _arrays_to_replay(batch: AttentionBatch) -> HostArrays:
    """Return the same for a step whose kernels are called without a check of how many states there are."""
    states = batch.states
    assert states is not None
    check_states(batch, next(len(each) for layer in states.layers for each in layer.values()))
    return _row_arrays(batch)


def _rows_of(batch: AttentionBatch) -> StepRows:
    rows: StepRows | None = batch.plans.get(_ROWS)
    if rows is None:
        rows = batch.plans[_ROWS] = StepRows(batch)
    return rows


def causal_conv(
    rows: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    bias: torch.Tensor | None,
    has_silu: bool,
) -> torch.Tensor:
    """See `KernelSet.causal_conv`."""
    step = _rows_of(batch)
    kind, stride, state_stride = _conv_numbers(
        form_of(rows),
        form_of(weight),
        form_of(state),
        None if bias is None else form_of(bias),
        (step.num_tokens, step.num_states),
    )
    out = rows.new_empty(rows.shape)
    num_taps, num_features = weight.shape
    _native.conv(
        rows.data_ptr(),
        out.data_ptr(),
        kind,
        stride,
        num_features,
        num_taps,
        weight.data_ptr(),
        address(bias),
        has_silu,
        state.data_ptr(),
        state_stride,
        step.native,
    )
    return out


@checked_once
def _conv_numbers(
    rows: Form, weight: Form, state: Form, bias: Form | None, step: tuple[int, int]
) -> tuple[int, int, int]:
    """Return the type, and the strides of rows and states."""
    num_tokens, num_states = step
    num_taps, num_features = tuple(weight[0])
    if not 2 <= num_taps <= _native.MAX_TAPS:
        raise ValueError(f"the weight has {num_taps} taps; there must be 2 to {_native.MAX_TAPS}")
    _check_floats("the weight", weight, (num_taps, num_features))
    if bias is not None:
        check_vector("the bias", bias, num_features)
    stride = row_stride("rows", rows, (num_tokens, num_features))
    if state[2] is not rows[2]:
        raise TypeError(f"the state is {state[2]}; it must be {rows[2]}, as the rows")
    state_stride = _state_stride(state, (num_taps - 1, num_features), num_states)
    return float_type("rows", rows), stride, state_stride


def gated_delta_rule(
    qkv: torch.Tensor,
    strengths: torch.Tensor,
    times: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    heads: DeltaHeads,
    out: torch.Tensor,
) -> None:
    """See `KernelSet.gated_delta_rule`."""
    step = _rows_of(batch)
    sizes = heads.num_keys, heads.num_values, heads.key_dim, heads.value_dim
    kind, strength_stride, time_stride, state_stride = _delta_numbers(
        (form_of(qkv), form_of(strengths), form_of(times), form_of(out)),
        form_of(state),
        (form_of(heads.decay), form_of(heads.time_bias)),
        (*sizes, step.num_tokens, step.num_states),
    )
    _native.delta_rule(
        qkv.data_ptr(),
        strengths.data_ptr(),
        strength_stride,
        times.data_ptr(),
        time_stride,
        out.data_ptr(),
        kind,
        *sizes,
        heads.times_per_head,
        heads.decay.data_ptr(),
        heads.time_bias.data_ptr(),
        heads.max_strength,
        state.data_ptr(),
        state_stride,
        step.native,
    )


@checked_once
def _delta_numbers(
    rows: tuple[Form, Form, Form, Form],
    state: Form,
    parameters: tuple[Form, Form],
    sizes: tuple[int, int, int, int, int, int],
) -> tuple[int, int, int, int]:
    """Return the type, and the strides of strengths, times and states."""
    num_keys, num_values, key_dim, value_dim, num_tokens, num_states = sizes
    if min(sizes[:4]) < 1 or num_values % num_keys or key_dim > _native.MAX_KEY_DIM:
        raise ValueError(
            f"there are {num_keys} key heads of {key_dim} and {num_values} value heads of {value_dim} "
            "features; each must be at least 1, the first divide the others, and keys have at most "
            f"{_native.MAX_KEY_DIM}"
        )
    decay, time_bias = parameters
    check_vector("decay", decay, num_values)
    num_times = key_dim if tuple(time_bias[0][1:]) == (key_dim,) else 1
    _check_floats("time_bias", time_bias, (num_values, num_times))
    qkv, strengths, times, out = rows
    for name, form in (("strengths", strengths), ("times", times), ("out", out)):
        if form[2] is not qkv[2]:
            raise TypeError(f"{name} is {form[2]}; it must be {qkv[2]}, as qkv")
    check_contiguous("qkv", qkv, (num_tokens, 2 * num_keys * key_dim + num_values * value_dim))
    check_contiguous("out", out, (num_tokens, num_values, value_dim))
    return (
        float_type("qkv", qkv),
        row_stride("strengths", strengths, (num_tokens, num_values)),
        row_stride("times", times, (num_tokens, num_values * num_times)),
        _memory_stride(state, (num_values, key_dim, value_dim), num_states),
    )


def selective_scan(
    inputs: torch.Tensor,
    times: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    heads: ScanHeads,
    out: torch.Tensor,
) -> None:
    """See `KernelSet.selective_scan`."""
    step = _rows_of(batch)
    sizes = heads.num_heads, heads.head_dim, heads.num_groups, heads.state_size
    kind, time_stride, out_stride, state_stride = _scan_numbers(
        (form_of(inputs), form_of(times), form_of(out)),
        form_of(state),
        (form_of(heads.decay), form_of(heads.time_bias), form_of(heads.skip)),
        (*sizes, step.num_tokens, step.num_states),
    )
    _native.scan(
        inputs.data_ptr(),
        times.data_ptr(),
        time_stride,
        out.data_ptr(),
        out_stride,
        kind,
        *sizes,
        heads.decay.data_ptr(),
        heads.time_bias.data_ptr(),
        heads.skip.data_ptr(),
        *heads.time_limits,
        state.data_ptr(),
        state_stride,
        step.native,
    )


@checked_once
def _scan_numbers(
    rows: tuple[Form, Form, Form],
    state: Form,
    vectors: tuple[Form, Form, Form],
    sizes: tuple[int, int, int, int, int, int],
) -> tuple[int, int, int, int]:
    """Return the type, and the strides of times, results and states."""
    num_heads, head_dim, num_groups, state_size, num_tokens, num_states = sizes
    if min(sizes[:4]) < 1 or num_heads % num_groups or state_size > _native.MAX_KEY_DIM:
        raise ValueError(
            f"there are {num_heads} heads of {head_dim} features, and {num_groups} groups of keys with "
            f"{state_size}; each must be at least 1, the groups divide the heads, and keys have at most "
            f"{_native.MAX_KEY_DIM}"
        )
    for name, vector in zip(("decay", "time_bias", "skip"), vectors, strict=True):
        check_vector(name, vector, num_heads)
    inputs, times, out = rows
    kind, value_size = float_type("inputs", inputs), num_heads * head_dim
    for name, form in (("times", times), ("out", out)):
        if form[2] is not inputs[2]:
            raise TypeError(f"{name} is {form[2]}; it must be {inputs[2]}, as inputs")
    check_contiguous("inputs", inputs, (num_tokens, value_size + 2 * num_groups * state_size))
    return (
        kind,
        row_stride("times", times, (num_tokens, num_heads)),
        written_row_stride("out", out, (num_tokens, value_size)),
        _memory_stride(state, (num_heads, state_size, head_dim), num_states),
    )


def _check_floats(name: str, form: Form, shape: tuple[int, ...]) -> None:
    if form[2] is not torch.float32:
        raise TypeError(f"{name} is {form[2]}; it must be float32")
    check_contiguous(name, form, shape)


def _memory_stride(state: Form, shape: tuple[int, int, int], num_states: int) -> int:
    """Return the elements from one state to the next, of memories in float32."""
    if state[2] is not torch.float32:
        raise TypeError(f"the state is {state[2]}; it must be float32")
    return _state_stride(state, shape, num_states)


def _state_stride(state: Form, shape: tuple[int, ...], num_states: int) -> int:
    """Return the elements from one state to the next."""
    sizes, strides = tuple(state[0]), state[1]
    if sizes[1:] != shape or not is_contiguous(shape, strides[1:]) or strides[0] < math.prod(shape):
        raise ValueError(
            f"the state is {list(sizes)} with strides {strides}; it must be [states, "
            f"{', '.join(map(str, shape))}], and the numbers of a state adjacent"
        )
    if sizes[0] < num_states:
        raise IndexError(f"a sequence has state {num_states - 1}; there are {sizes[0]}")
    check_on_cpu("the state", state)
    return strides[0]
