"""Layers with a state in Triton: what is checked of a call, and launches.

The host neither waits nor reads back, and only the sizes of a step decide what is launched.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads, check_states
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import is_interpreted
from quire.kernels.triton.recurrence.kernels import (
    SEQUENCE_FIELDS,
    conv_kernel,
    delta_rule_kernel,
    keep_inputs_kernel,
    scan_kernel,
)
from quire.kernels.triton.tensors import check_rows, check_vector

_CONV_BLOCK = 1024 if is_interpreted else 256  # features of a program
_VALUES = 256 if is_interpreted else 8
"""Features of a head's values of a program, which is one warp: it adds up a memory's columns by itself."""


def causal_conv(
    rows: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: AttentionBatch,
    *,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """See `KernelSet.causal_conv`.

    Raises:
        TypeError, ValueError, IndexError: a tensor or the batch is not as it must be.
    """
    num_taps, num_features = weight.shape
    sequences, sequence_of_row = _sequences_of(batch, state)
    check_rows("rows", rows)
    _check_shape("rows", rows, batch.num_rows, num_features)
    check_vector("the weight", weight.flatten(), torch.float32, num_taps * num_features)
    if bias is not None:
        check_vector("the bias", bias, torch.float32, num_features)
    if num_taps < 2 or activation not in ("", "silu"):
        raise ValueError(
            f"there are {num_taps} taps and the activation {activation!r}; at least 2, and silu or none, are "
            "supported"
        )
    _check_state(state, rows.dtype, num_taps - 1, num_features)
    out = rows.new_empty(rows.shape)
    block = min(next_power_of_2(num_features), _CONV_BLOCK)
    num_blocks = -(-num_features // block)
    options = {"TAPS": num_taps, "BLOCK": block, "enable_fp_fusion": False}
    if len(rows):
        conv_kernel[len(rows), num_blocks](
            rows,
            rows.stride(0),
            weight,
            bias,
            state,
            state.stride(0),
            sequences,
            sequence_of_row,
            out,
            num_features,
            HAS_BIAS=bias is not None,
            HAS_SILU=bool(activation),
            **options,
        )
        keep_inputs_kernel[len(sequences), num_blocks](
            rows, rows.stride(0), state, state.stride(0), sequences, num_features, **options
        )
    return out


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
    """See `KernelSet.gated_delta_rule`.

    Raises:
        TypeError, ValueError, IndexError: a tensor or the batch is not as it must be.
    """
    num_keys, num_values, key_dim, value_dim = (
        heads.num_keys,
        heads.num_values,
        heads.key_dim,
        heads.value_dim,
    )
    if num_values % num_keys:
        raise ValueError(
            f"there are {num_keys} key heads and {num_values} value heads; the first must divide these"
        )
    sequences, _ = _sequences_of(batch, state)
    num_rows = batch.num_rows
    check_rows("qkv", qkv)
    _check_shape("qkv", qkv, num_rows, 2 * num_keys * key_dim + num_values * value_dim)
    num_times = heads.times_per_head
    if num_times not in (1, key_dim):
        raise ValueError(
            f"a head has {num_times} times; it must be 1, or one of each of its {key_dim} features"
        )
    for name, tensor, width in (
        ("strengths", strengths, num_values),
        ("times", times, num_values * num_times),
    ):
        check_rows(name, tensor)
        _check_shape(name, tensor, num_rows, width, dtype=qkv.dtype)
    _check_shape("out", out, num_rows, num_values, value_dim, dtype=qkv.dtype, is_contiguous=True)
    check_vector("decay", heads.decay, torch.float32, num_values)
    _check_shape("time_bias", heads.time_bias, num_values, num_times, dtype=torch.float32, is_contiguous=True)
    _check_state(state, torch.float32, num_values, key_dim, value_dim)
    columns = min(next_power_of_2(value_dim), _VALUES)
    if num_rows:
        delta_rule_kernel[len(sequences), num_values, -(-value_dim // columns)](
            qkv,
            qkv.stride(0),
            strengths,
            strengths.stride(0),
            times,
            times.stride(0),
            heads.decay,
            heads.time_bias,
            state,
            state.stride(0),
            sequences,
            out,
            heads.max_strength,
            key_dim**-0.5,
            NUM_KEYS=num_keys,
            NUM_VALUES=num_values,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            TIMES=num_times,
            KEYS=next_power_of_2(key_dim),
            VALUES=columns,
            num_warps=1,
            enable_fp_fusion=False,
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
    """See `KernelSet.selective_scan`.

    Raises:
        TypeError, ValueError, IndexError: a tensor or the batch is not as it must be.
    """
    num_heads, head_dim, num_groups, size = (
        heads.num_heads,
        heads.head_dim,
        heads.num_groups,
        heads.state_size,
    )
    if num_heads % num_groups:
        raise ValueError(
            f"there are {num_heads} heads and {num_groups} groups of keys; these must divide the first"
        )
    sequences, _ = _sequences_of(batch, state)
    num_rows, value_size = batch.num_rows, num_heads * head_dim
    widths = value_size + 2 * num_groups * size, num_heads, value_size
    for name, tensor, width in zip(("inputs", "times", "out"), (inputs, times, out), widths, strict=True):
        check_rows(name, tensor)
        _check_shape(name, tensor, num_rows, width, dtype=inputs.dtype)
    for name, vector in (("decay", heads.decay), ("time_bias", heads.time_bias), ("skip", heads.skip)):
        check_vector(name, vector, torch.float32, num_heads)
    _check_state(state, torch.float32, num_heads, size, head_dim)
    columns = min(next_power_of_2(head_dim), _VALUES)
    if num_rows:
        scan_kernel[len(sequences), num_heads, -(-head_dim // columns)](
            inputs,
            inputs.stride(0),
            times,
            times.stride(0),
            heads.decay,
            heads.time_bias,
            heads.skip,
            state,
            state.stride(0),
            sequences,
            out,
            out.stride(0),
            *heads.time_limits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            NUM_GROUPS=num_groups,
            STATE_SIZE=size,
            KEYS=next_power_of_2(size),
            VALUES=columns,
            num_warps=1,
            enable_fp_fusion=False,
        )


def _check_shape(
    name: str,
    tensor: torch.Tensor,
    *shape: int,
    dtype: torch.dtype | None = None,
    is_contiguous: bool = False,
) -> None:
    if dtype is not None and tensor.dtype is not dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
    if tensor.shape != shape or (is_contiguous and not tensor.is_contiguous()):
        raise ValueError(
            f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; it must be {list(shape)}"
            f"{' and contiguous' if is_contiguous else ''}"
        )


def _check_state(state: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    if state.dtype is not dtype:
        raise TypeError(f"the state is {state.dtype}; it must be {dtype}")
    if state.shape[1:] != shape or not state[:1].is_contiguous():
        raise ValueError(
            f"the state is {list(state.shape)} with strides {state.stride()}; it must be [states, "
            f"{', '.join(map(str, shape))}], and the numbers of a state adjacent"
        )


def _sequences_of(batch: AttentionBatch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step's sequences [N, SEQUENCE_FIELDS] int32 and which of them each row is of, [T] int32.

    They are where the kernels are, checked and copied once.
    """
    make = functools.partial(_sequences, len(state))
    sequences, sequence_of_row = batch.on_device(("triton sequences", len(state)), make, state.device).arrays
    return sequences, sequence_of_row


def _sequences(num_states: int, batch: AttentionBatch) -> HostArrays:
    """Return them on the host: each padding row is a sequence without a state, and others have no rows."""
    check_states(batch, num_states)
    assert batch.states is not None
    counts, num_seqs = batch.num_tokens, len(batch.num_tokens)
    ends = np.cumsum(counts)
    firsts = ends - counts
    padding = np.arange(int(counts.sum()), batch.num_rows)
    of_padding = slice(num_seqs, num_seqs + len(padding))
    size = batch.sizes.rows(of_padding.stop)
    sequences = np.zeros((size, SEQUENCE_FIELDS.value), dtype=np.int32)
    sequences[:, 0] = -1
    begun = batch.num_cached_tokens > 0
    sequences[:num_seqs] = np.stack(
        [batch.states.numbers, begun, firsts, ends, firsts + batch.num_state_tokens], axis=1
    )
    sequences[of_padding, 2], sequences[of_padding, 3] = padding, padding + 1
    sequence_of_row = np.repeat(np.arange(of_padding.stop), np.concatenate([counts, np.ones_like(padding)]))
    return HostArrays((sequences, sequence_of_row.astype(np.int32)))
