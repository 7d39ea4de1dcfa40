"""The native kernels as one set: C++ (native/src), for the instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.bounds import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from quire.kernels.cpu import _native, threads
from quire.kernels.cpu.layers import attention_plan, is_native, native_key_scores, native_layer
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.rotary import rotary_layer, rotary_step
from quire.kernels.cpu.sampling import NativeSampling
from quire.kernels.cpu.tensors import (
    address,
    check_attended,
    check_norm_weight,
    check_sinks,
    common_type,
    float_type,
    row_stride,
    token_stride,
    written_row_stride,
)
from quire.kernels.interface import KernelSet
from quire.kernels.layers.expert_by_expert import ExpertByExpert
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.weights import Weight
from quire.kernels.reference import ReferenceKernels
from quire.kernels.sampling.rows import SamplingKernels
from quire.kernels.sampling.token_choice import TokenChoice

_ACTIVATIONS = {kind.name: kind.value for kind in _native.Activation}
_REFERENCE = ReferenceKernels()


class NativeKernels(KernelSet):
    """Takes float32, bfloat16 and float16, in rows [T, n] whose numbers are adjacent.

    Attention has products of bfloat16 numbers if the query is bfloat16, the cache bfloat16 or int8, and the
    CPU has AVX-512 BF16; everything else is float32. Heads that the kernel does not have (bounds.py) go to
    the reference.

    Every call checks its arguments before the first address is followed; what depends only on the step or on
    the layer is checked once for it.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape, stride or device is not as it must be.
        IndexError: a block id, a place or a token id is out of range.
    """

    name = "native"
    sampling: ClassVar[SamplingKernels | TokenChoice] = NativeSampling()

    @property
    @override
    def weight_layout(self) -> str:
        return _native.instruction_set()

    @override
    def use_threads(self, num_threads: int) -> None:
        threads.use_threads(num_threads)
        torch.set_num_threads(1)  # what is left to torch is small, and its own threads would compete

    @override
    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any) -> Linear:
        return PackedLinear(parts, bias, **options)

    @override
    def experts(self, weights: Iterable[ExpertWeights], mixture: Mixture, **options: Any) -> Experts:
        return ExpertByExpert(weights, mixture, self, **options)

    @override
    def rms_norm(
        self, rows: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_norm_weight(weight, rows.shape[-1])
        out = rows.new_empty(rows.shape) if out is None else out
        _norm(rows, None, weight, out, scale=1.0, eps=eps)
        return out

    @override
    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if delta.dtype is not residual.dtype:
            raise TypeError(f"delta is {delta.dtype}; it must be {residual.dtype}, as the residual")
        if weight is None:
            out = residual
        else:
            check_norm_weight(weight, residual.shape[-1])
            if out is None:
                out = residual.new_empty(residual.shape)
        _norm(residual, delta, weight, out, scale=scale, eps=eps)
        return out

    @override
    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_rows, twice = gate_up.shape
        num_features = twice // 2
        if twice != 2 * num_features or activation not in _ACTIVATIONS:
            raise ValueError(
                f"gate_up has {twice} columns and the activation is {activation}; there must be as many for "
                f"gate as for up, and the activation one of {', '.join(_ACTIVATIONS)}"
            )
        shape = num_rows, num_features
        if out is None:
            out = gate_up.new_empty(shape)
        _native.gated_activation(
            gate_up.data_ptr(),
            out.data_ptr(),
            common_type(gate_up, out),
            _ACTIVATIONS[activation],
            num_rows,
            num_features,
            row_stride("gate_up", gate_up),
            written_row_stride("out", out, shape),
        )
        return out

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
        if not is_native(kv):
            return _REFERENCE.rotary_and_write_kv(
                qkv, kv, batch, heads=heads, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        step = rotary_step(batch, cos, sin)
        layer = rotary_layer(kv, heads, q_norm, k_norm)
        layer.check(step)
        qkv_stride = written_row_stride("qkv", qkv, (step.num_rows, layer.width))
        _native.rotary_and_write_kv(
            layer.native,
            qkv.data_ptr(),
            float_type("qkv", qkv),
            step.num_rows,
            qkv_stride,
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
        return qkv.as_strided(shape, (qkv_stride, heads.head_dim, 1))

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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM or not is_native(kv):
            return _REFERENCE.paged_attention(
                query, kv, batch, scale=scale, window=window, softcap=softcap, sinks=sinks, out=out
            )  # fmt: skip
        query_stride = token_stride("the query", query)
        layer = native_layer(kv)
        plan = attention_plan(batch, layer, query.shape, window)
        if sinks is not None:
            check_sinks(sinks, num_heads)
        if out is None:
            out = query.new_empty((num_tokens, num_heads, head_dim))
        else:
            check_attended(out, query)
        plan.attend(
            layer.native,
            query.data_ptr(),
            float_type("the query", query),
            query_stride,
            out.data_ptr(),
            scale,
            softcap,
            address(sinks),
            native_key_scores(batch),
        )
        return out


def _norm(
    rows: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    eps: float,
) -> None:
    shape = num_rows, num_features = rows.shape
    _native.norm(
        rows.data_ptr(),
        address(delta),
        address(weight),
        out.data_ptr(),
        common_type(rows, out),
        num_rows,
        num_features,
        row_stride("rows", rows) if delta is None else written_row_stride("the residual", rows, shape),
        0 if delta is None else row_stride("delta", delta, shape),
        written_row_stride("out", out, shape),
        scale,
        eps,
    )
