"""The native kernels as one set: C++ (native/src), for the instruction set of this CPU."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from typing_extensions import override

from quire.kernels import native_output_bits
from quire.kernels.arrays import Float64Array
from quire.kernels.attention.batch import AttentionBatch, check_distance_bias
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from quire.kernels.cpu import _native
from quire.kernels.cpu.experts import PackedExperts
from quire.kernels.cpu.layers import LAYER, PLAN, attention_plan, native_key_scores, native_layer
from quire.kernels.cpu.linear import BLOCK_KINDS, linear_of, output_linear_of
from quire.kernels.cpu.programs import NativePrograms, refuse_recording
from quire.kernels.cpu.recurrence import causal_conv, gated_delta_rule, selective_scan
from quire.kernels.cpu.rotary import ROTARY, rotary_layer, rotary_numbers, rotary_step
from quire.kernels.cpu.sampling import NativeScans
from quire.kernels.cpu.tensors import (
    Form,
    address,
    check_arrays,
    check_contiguous,
    check_on_cpu,
    check_vector,
    checked_once,
    float_type,
    form_of,
    row_stride,
    written_row_stride,
)
from quire.kernels.devices.cores import usable_cores, usable_cpus
from quire.kernels.interface import Capture, KernelSet
from quire.kernels.layers.activations import ACTIVATIONS
from quire.kernels.layers.expert_by_expert import ExpertByExpert
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import Weight, is_reordered
from quire.kernels.reference import ReferenceKernels
from quire.kernels.sampling.host_choice import HostChoice
from quire.kernels.sampling.token_choice import TokenChoice
from quire.kernels.size_classes import EXACT_SIZES
from quire.step import Int64Array

logger = logging.getLogger(__name__)

_ACTIVATIONS = {kind.name: kind.value for kind in _native.Activation if kind.name in ACTIVATIONS}
_REFERENCE = ReferenceKernels()


class NativeKernels(KernelSet):
    """Takes float32, bfloat16 and float16, in rows [T, n] whose numbers are adjacent.

    Attention has products of bfloat16 numbers if the query is bfloat16, the cache bfloat16 or int8, and the
    CPU has AVX-512 BF16; everything else is float32. Heads that the kernel does not have (bounds.py) go to
    the reference.

    Arguments are checked before the first address is followed: tensors when their form is first met, the step
    and the layer once for each. The methods look up what was checked, and call nothing where there is nothing
    new.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape, stride or device is not as it must be.
        IndexError: a block id, a place or a token id is out of range.
    """

    name = "native"
    block_kinds = BLOCK_KINDS
    step_sizes = EXACT_SIZES
    sampling: ClassVar[TokenChoice] = HostChoice(NativeScans())

    @property
    @override
    def capture(self) -> Capture:
        return NativePrograms().capture

    @override
    def output_bits(self, int4_activations: str = "int8") -> int:
        return native_output_bits(int4_activations)

    @property
    @override
    def weight_layout(self) -> str:
        return _native.instruction_set()

    @override
    def use_threads(self, num_threads: int) -> None:
        if num_threads > usable_cpus():
            logger.warning(
                "EngineConfig.num_threads is %d, but this process may use only %d CPUs; a thread that waits "
                "for one holds up the others: lower it, or set it to 0",
                num_threads,
                usable_cpus(),
            )
        _native.set_threads(num_threads or usable_cores())
        torch.set_num_threads(1)  # what is left to torch is small, and its own threads would compete

    @override
    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any) -> Linear:
        return linear_of(parts, bias, **options)

    @override
    def output_linear(
        self, parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any
    ) -> Linear:
        return output_linear_of(parts, bias, **options)

    @override
    def experts(self, weights: Iterable[ExpertWeights], mixture: Mixture, **options: Any) -> Experts:
        weights = iter(weights)
        first = next(weights)
        weights = itertools.chain((first,), weights)
        is_reordering = any(is_reordered(part) for part in (*first.gate_up, *first.down))
        if not mixture.is_gated or is_reordering or mixture.num_experts > _native.MAX_EXPERTS:
            return ExpertByExpert(weights, mixture, self, **options)
        return PackedExperts(weights, mixture, **options)

    @override
    def rms_norm(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = rows.new_empty(rows.shape) if out is None else out
        numbers = _norm_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            None,
            (weight.shape, weight.stride(), weight.dtype, weight.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.is_cpu),
        )
        bias_address = 0 if bias is None else bias.data_ptr()
        _native.norm(rows.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), *numbers, 1.0, eps, bias_address)
        return out

    @override
    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight is None:
            out = residual
        elif out is None:
            out = residual.new_empty(residual.shape)
        numbers = _norm_numbers(
            (residual.shape, residual.stride(), residual.dtype, residual.is_cpu),
            (delta.shape, delta.stride(), delta.dtype, delta.is_cpu),
            None if weight is None else (weight.shape, weight.stride(), weight.dtype, weight.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.is_cpu),
        )
        weight_address = 0 if weight is None else weight.data_ptr()
        _native.norm(
            residual.data_ptr(),
            delta.data_ptr(),
            weight_address,
            out.data_ptr(),
            *numbers,
            scale,
            eps,
            0 if bias is None else bias.data_ptr(),
        )
        return out

    @override
    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is None:
            num_rows, twice = gate_up.shape
            out = gate_up.new_empty((num_rows, twice // 2))
        numbers = _gated_numbers(
            (gate_up.shape, gate_up.stride(), gate_up.dtype, gate_up.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            activation,
        )
        _native.gated_activation(gate_up.data_ptr(), out.data_ptr(), *numbers)
        return out

    @override
    def activation(
        self, rows: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = rows.new_empty(rows.shape) if out is None else out
        numbers = _activation_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu),
            activation,
        )
        _native.gated_activation(rows.data_ptr(), out.data_ptr(), *numbers)
        return out

    @override
    def apply_gate(
        self,
        rows: torch.Tensor,
        gate: torch.Tensor,
        *,
        activation: Literal["silu", "sigmoid"],
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        numbers = _gate_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (gate.shape, gate.stride(), gate.dtype, gate.is_cpu),
            None if norm is None else (norm.shape, norm.stride(), norm.dtype, norm.is_cpu),
            activation,
        )
        _native.gate(rows.data_ptr(), gate.data_ptr(), *numbers, 0 if norm is None else norm.data_ptr(), eps)
        return rows

    @override
    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        if logits.dtype is not torch.float32:
            raise TypeError(f"logits are {logits.dtype}; they must be float32")
        check_contiguous("logits", form_of(logits), tuple(logits.shape))
        _native.soft_cap(logits.data_ptr(), logits.numel(), cap)
        return logits

    @override
    def sum_rows(
        self,
        rows: torch.Tensor,
        pieces: Int64Array,
        sums: torch.Tensor,
        *,
        unit: float,
        shares: Float64Array | None = None,
    ) -> None:
        numbers = _sum_numbers(
            (rows.shape, rows.stride(), rows.dtype, rows.is_cpu),
            (sums.shape, sums.stride(), sums.dtype, sums.is_cpu),
        )
        check_arrays(("pieces", pieces, np.dtype(np.int64), (len(pieces), 4)))
        if shares is not None:
            check_arrays(("shares", shares, np.dtype(np.float64), (len(rows),)))
        _native.sum_rows(
            rows.data_ptr(),
            *numbers,
            pieces.ctypes.data,
            len(pieces),
            0 if shares is None else shares.ctypes.data,
            sums.data_ptr(),
            len(sums),
            unit,
        )

    @override
    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        heads: HeadLayout,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        if batch.is_two_sided and cos is None and sin is None and q_norm is None and k_norm is None:
            queries = qkv[:, : heads.num_heads * heads.head_dim]  # rows stay as they are
            return queries.view(len(qkv), heads.num_heads, heads.head_dim)
        layer = kv.handles.get(ROTARY)
        if (
            layer is None
            or layer.heads is not heads
            or layer.q_norm is not q_norm
            or layer.k_norm is not k_norm
        ):
            layer = rotary_layer(kv, heads, q_norm, k_norm)
        if layer is None:
            return _reference().rotary_and_write_kv(
                qkv, kv, batch, heads=heads, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        step = batch.plans.get((ROTARY, id(cos)))
        if step is None or step.sin is not sin:
            step = rotary_step(batch, cos, sin, layer)
        if layer.shape not in step.fitting:
            layer.check(step)
        kind, stride = _qkv_numbers(
            (qkv.shape, qkv.stride(), qkv.dtype, qkv.is_cpu), step.num_rows, layer.width
        )
        _native.rotary_and_write_kv(
            layer.native,
            qkv.data_ptr(),
            kind,
            step.num_rows,
            stride,
            heads.num_heads,
            step.cos_address,
            step.sin_address,
            step.half,
            layer.q_norm_address,
            layer.k_norm_address,
            layer.q_norm_size,
            layer.k_norm_size,
            eps,
            step.blocks_address,
            step.offsets_address,
        )
        shape = step.num_rows, heads.num_heads, heads.head_dim
        return qkv.as_strided(shape, (stride, heads.head_dim, 1))

    @override
    def rotary(
        self,
        states: torch.Tensor,
        *,
        head_dim: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        kind, num_rows, stride, num_heads, half, norm_size = rotary_numbers(
            form_of(states),
            *(None if tensor is None else form_of(tensor) for tensor in (cos, sin, norm)),
            head_dim,
        )
        _native.rotary(
            states.data_ptr(),
            kind,
            num_rows,
            stride,
            num_heads,
            head_dim,
            address(cos),
            address(sin),
            half,
            address(norm),
            norm_size,
            eps,
        )
        return states.view(num_rows, num_heads, head_dim)

    @override
    def paged_attention(
        self,
        query: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = query.shape
        layer = None
        if not shape[-1] % HEAD_DIM_MULTIPLE and shape[-1] <= MAX_HEAD_DIM:
            layer = kv.handles.get(LAYER) or native_layer(kv)
        if layer is None or layer.value_dim % HEAD_DIM_MULTIPLE or layer.value_dim > MAX_HEAD_DIM:
            return _reference().paged_attention(
                query, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
                distance_bias=distance_bias, out=out
            )  # fmt: skip
        plan = batch.plans.get((PLAN, window, shape, layer.shape))
        if plan is None:
            plan = attention_plan(batch, layer, shape, window)
        if out is None:
            out = query.new_empty((*shape[:-1], layer.value_dim))
        kind, stride = _attention_numbers(
            layer.value_dim,
            (shape, query.stride(), query.dtype, query.is_cpu),
            (out.shape, out.stride(), out.dtype, out.is_cpu and out.is_contiguous()),
            None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.is_cpu),
        )
        max_distance = 0
        if distance_bias is not None:
            max_distance = _max_distance(distance_bias, shape[1], batch)
        plan.attend(
            layer.native,
            query.data_ptr(),
            kind,
            stride,
            out.data_ptr(),
            scale,
            softcap,
            0 if sinks is None else sinks.data_ptr(),
            None if batch.key_scores is None else native_key_scores(batch.key_scores),
            0 if distance_bias is None else distance_bias.data_ptr(),
            max_distance,
        )
        return out

    @override
    def causal_conv(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        bias: torch.Tensor | None = None,
        activation: str = "",
    ) -> torch.Tensor:
        if activation not in ("", "silu"):
            raise ValueError(f"the activation is {activation!r}; it must be silu, or empty")
        return causal_conv(rows, weight, state, batch, bias=bias, has_silu=activation == "silu")

    @override
    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        strengths: torch.Tensor,
        times: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        heads: DeltaHeads,
        out: torch.Tensor,
    ) -> None:
        fits = heads.key_dim <= _native.MAX_KEY_DIM
        kernel = gated_delta_rule if fits else _reference().gated_delta_rule
        kernel(qkv, strengths, times, state, batch, heads=heads, out=out)

    @override
    def selective_scan(
        self,
        inputs: torch.Tensor,
        times: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        *,
        heads: ScanHeads,
        out: torch.Tensor,
    ) -> None:
        fits = heads.state_size <= _native.MAX_KEY_DIM
        kernel = selective_scan if fits else _reference().selective_scan
        kernel(inputs, times, state, batch, heads=heads, out=out)


def _reference() -> ReferenceKernels:
    refuse_recording("a layer that the reference kernels compute")
    return _REFERENCE


@checked_once
def _norm_numbers(
    rows: Form, delta: Form | None, weight: Form | None, out: Form, bias: Form | None
) -> tuple[int, int, int, int, int, int]:
    """Return the type of a norm, the rows and features, and the strides of rows, delta and result."""
    name = "rows" if delta is None else "the residual"
    stride, delta_stride = row_stride(name, rows), 0
    shape = num_rows, num_features = tuple(rows[0])
    if weight is not None:
        check_vector("a norm's weight", weight, num_features)
    if bias is not None:
        check_vector("a norm's bias", bias, num_features)
        if weight is None:
            raise ValueError("a norm has a bias and no weight; it must have both, or neither")
    if delta is not None:
        if delta[2] is not rows[2]:
            raise TypeError(f"delta is {delta[2]}; it must be {rows[2]}, as the residual")
        written_row_stride(name, rows, shape)
        delta_stride = row_stride("delta", delta, shape)
    kind = _common_type(rows, out)
    return kind, num_rows, num_features, stride, delta_stride, written_row_stride("out", out, shape)


@checked_once
def _sum_numbers(rows: Form, sums: Form) -> tuple[int, int, int, int]:
    """Return the type, the number of rows, the elements between them and the numbers of each."""
    num_rows, num_features = rows[0]
    if sums[2] is not torch.float64:
        raise TypeError(f"sums is {sums[2]}; it must be float64")
    check_contiguous("sums", sums, (sums[0][0], num_features))
    return float_type("rows", rows), num_rows, row_stride("rows", rows), num_features


@checked_once
def _gated_numbers(gate_up: Form, out: Form, activation: str) -> tuple[int, int, int, int, int, int, bool]:
    """Return the type, the activation, the rows and features, the strides of both, and that there is `up`."""
    stride = row_stride("gate_up", gate_up)
    num_rows, twice = gate_up[0]
    num_features = twice // 2
    if twice != 2 * num_features or activation not in _ACTIVATIONS:
        raise ValueError(
            f"gate_up has {twice} columns and the activation is {activation}; there must be as many for "
            f"gate as for up, and the activation one of {', '.join(_ACTIVATIONS)}"
        )
    out_stride = written_row_stride("out", out, (num_rows, num_features))
    kind = _common_type(gate_up, out)
    return kind, _ACTIVATIONS[activation], num_rows, num_features, stride, out_stride, True


@checked_once
def _activation_numbers(rows: Form, out: Form, activation: str) -> tuple[int, int, int, int, int, int, bool]:
    """Return the same of an activation without `up`."""
    stride = row_stride("rows", rows)
    num_rows, num_features = shape = tuple(rows[0])
    if activation not in _ACTIVATIONS:
        raise ValueError(f"the activation is {activation}; it must be one of {', '.join(_ACTIVATIONS)}")
    kind, out_stride = _common_type(rows, out), written_row_stride("out", out, shape)
    return kind, _ACTIVATIONS[activation], num_rows, num_features, stride, out_stride, False


@checked_once
def _gate_numbers(
    rows: Form, gate: Form, norm: Form | None, activation: str
) -> tuple[int, bool, int, int, int, int, int, int]:
    """Return the type, whether the activation is silu, the sizes of rows, and the strides of gates."""
    shape, (gate_shape, strides) = tuple(rows[0]), gate[:2]
    *outer, num_features = shape
    if len(outer) not in (1, 2) or activation not in ("silu", "sigmoid"):
        raise ValueError(
            f"rows are {list(shape)} and the activation is {activation!r}; they must be [tokens, features] "
            "or [tokens, heads, features], and the activation silu or sigmoid"
        )
    check_contiguous("rows", rows, shape)
    is_whole = gate_shape == shape and (strides[-1] == 1 or num_features == 1)
    if not is_whole and gate_shape != (*outer, 1):
        raise ValueError(
            f"gate is {list(gate_shape)} with strides {strides}; it must be {list(shape)}, and the numbers "
            f"of a row adjacent, or {[*outer, 1]}"
        )
    check_on_cpu("gate", gate)
    if norm is not None:
        check_vector("norm", norm, num_features)
    num_tokens, num_heads, head_stride = (*outer, strides[1]) if len(outer) == 2 else (*outer, 1, 0)
    sizes = num_tokens, num_heads, num_features
    return (
        _common_type(rows, gate, "gate"),
        activation == "silu",
        *sizes,
        strides[0],
        head_stride,
        int(is_whole),
    )


@checked_once
def _qkv_numbers(qkv: Form, num_rows: int, width: int) -> tuple[int, int]:
    """Return the type and the stride of rows of queries, keys and values."""
    stride = written_row_stride("qkv", qkv, (num_rows, width))
    return float_type("qkv", qkv), stride


@checked_once
def _attention_numbers(value_dim: int, query: Form, out: Form, sinks: Form | None) -> tuple[int, int]:
    """Return the type and the stride of queries; of `out`, the last says whether it is contiguous, too."""
    shape, strides, dtype, _ = query
    check_on_cpu("the query", query)
    if strides[1:] != (shape[2], 1):
        raise ValueError(f"the query's strides are {strides}; the numbers of a token must be adjacent")
    result = (*shape[:-1], value_dim)
    if out[0] != result or out[2] is not dtype or not out[3]:
        raise ValueError(
            f"out is {out[2]} {tuple(out[0])} with strides {out[1]}; it must be {dtype} {result} and "
            "contiguous, on the CPU"
        )
    if sinks is not None:
        check_vector("sinks", sinks, shape[1])
    return float_type("the query", query), strides[0]


def _max_distance(distance_bias: torch.Tensor, num_heads: int, batch: AttentionBatch) -> int:
    """Return the distance from which on a bias stays as it is."""
    check_distance_bias(distance_bias, num_heads, batch)
    check_on_cpu("distance_bias", form_of(distance_bias))
    return distance_bias.shape[1] // 2


def _common_type(rows: Form, other: Form, name: str = "out") -> int:
    """Return the number of the type that both have."""
    if other[2] is not rows[2]:
        raise TypeError(f"the rows are {rows[2]} and {name} is {other[2]}; both must have the same type")
    return float_type("rows", rows)
