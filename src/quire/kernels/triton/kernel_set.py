"""The kernels in Triton as one set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.devices.cores import usable_cores
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.interface import KernelSet
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.linear import Linear
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import Weight
from quire.kernels.reference import ReferenceKernels
from quire.kernels.sampling.token_choice import TokenChoice
from quire.kernels.triton import rows as row_kernels
from quire.kernels.triton.attention.paged import paged_attention
from quire.kernels.triton.attention.rotary import rotary_and_write_kv
from quire.kernels.triton.device import kernel_device
from quire.kernels.triton.experts.layer import FusedExperts
from quire.kernels.triton.kernel import compile_only, compiles_only, hash_compiler_ahead
from quire.kernels.triton.linear.dense import linear
from quire.kernels.triton.linear.tiled import gated_linear
from quire.kernels.triton.recurrence import layers as recurrence
from quire.kernels.triton.sampling.token_choice import TritonChoice

_REFERENCE = ReferenceKernels()


class TritonKernels(KernelSet):
    """Takes float32, bfloat16 and float16, in rows [T, n] whose numbers are adjacent.

    Tensors are on the GPU, or on the CPU in Triton's interpreter. No call waits for the device.
    """

    name = "triton"
    takes_any_value_size = False
    takes_chunks = False
    sampling: ClassVar[TokenChoice] = TritonChoice()
    weight_layout = None

    def __init__(self) -> None:
        self.device = kernel_device()
        hash_compiler_ahead()

    @override
    def use_threads(self, num_threads: int) -> None:
        _REFERENCE.use_threads(num_threads)

    @override
    def compile_only(self) -> AbstractContextManager[None]:
        return compile_only(usable_cores())

    @property
    @override
    def compiles_only(self) -> bool:
        return compiles_only()

    @override
    def linear(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        int4_activations: str = "int8",
        memory: WeightMemory | None = None,
    ) -> Linear:
        return linear(
            parts,
            bias,
            dtype=dtype,
            quantization=quantization,
            group_size=group_size,
            int4_activations=int4_activations,
            memory=memory,
        )

    @override
    def gated_linear(self, gate_up: Linear, activation: str) -> GatedLinear:
        return gated_linear(self, gate_up, activation)

    @override
    def experts(self, weights: Iterable[ExpertWeights], mixture: Mixture, **options: Any) -> Experts:
        return FusedExperts(weights, mixture, **options)

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
        return row_kernels.rms_norm(rows, weight, eps=eps, bias=bias, out=out)

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
        return row_kernels.add_rms_norm(residual, delta, weight, eps=eps, bias=bias, scale=scale, out=out)

    @override
    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return row_kernels.gated_activation(gate_up, activation, out=out)

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
        return rotary_and_write_kv(
            qkv, kv, batch, heads=heads, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

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
        return paged_attention(
            query,
            kv,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            distance_bias=distance_bias,
            out=out,
        )

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
        return recurrence.causal_conv(rows, weight, state, batch, bias=bias, activation=activation)

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
        recurrence.gated_delta_rule(qkv, strengths, times, state, batch, heads=heads, out=out)

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
        recurrence.selective_scan(inputs, times, state, batch, heads=heads, out=out)
