"""The kernels in plain torch on the CPU, and numpy for sampling.

Every function gives a row the same bits whatever the other rows are and however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from typing_extensions import override

from quire.kernels.attention.batch import AttentionBatch, check_distance_bias
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.paged import DistanceBias, Scores, SeenBlocks, attend
from quire.kernels.attention.sparse_prefill import selected_keys
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.devices.torch_internals import has_onednn_bfloat16
from quire.kernels.interface import KernelSet, apply_rotary
from quire.kernels.layers.activations import ACTIVATIONS
from quire.kernels.layers.expert_by_expert import ExpertByExpert
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.linear import (
    FloatLinear,
    GroupedLinear,
    Int8Linear,
    Linear,
    OneDnnLinear,
    quantization_of,
)
from quire.kernels.layers.recurrence import (
    DeltaHeads,
    ScanHeads,
    causal_conv,
    gated_delta_rule,
    selective_scan,
)
from quire.kernels.layers.weights import Weight
from quire.kernels.sampling.host_choice import HostChoice
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.sampling.token_choice import TokenChoice


class ReferenceKernels(KernelSet):
    """What the other kernels are tested against. torch allocates by itself."""

    name = "reference"
    sampling: ClassVar[TokenChoice] = HostChoice(ReferenceScans())
    weight_layout = None

    @override
    def use_threads(self, num_threads: int) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)

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
        kind = quantization_of(parts, quantization, group_size)
        if kind == "int8":
            return Int8Linear(parts, bias)
        if kind in ("int4", "grouped_int8"):
            return GroupedLinear(parts, bias, group_size, int4_activations)
        if dtype == torch.bfloat16 and has_onednn_bfloat16():
            return OneDnnLinear(parts, bias)
        return FloatLinear(parts, bias, dtype)

    @override
    def experts(self, weights: Iterable[ExpertWeights], mixture: Mixture, **options: Any) -> Experts:
        return ExpertByExpert(weights, mixture, self, **options)

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
        if bias is not None:
            return _into(out, F.layer_norm(rows.float(), weight.shape, weight, bias, eps).to(rows.dtype))
        return _into(out, F.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype))

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
        residual.copy_(residual.float() + delta.float() * scale)
        return residual if weight is None else self.rms_norm(residual, weight, eps=eps, bias=bias, out=out)

    @override
    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return _into(out, ACTIVATIONS[activation](gate).mul_(up).to(gate_up.dtype))

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
        size, value_size = heads.head_dim, heads.value_size
        sizes = [heads.num_heads * size, heads.num_kv_heads * size, heads.num_kv_heads * value_size]
        query, key, value = torch.split(qkv, sizes, dim=-1)
        for states, norm in ((query, q_norm), (key, k_norm)):
            if norm is not None:
                grouped = states.view(len(states), -1, len(norm))
                self.rms_norm(grouped, norm, eps=eps, out=grouped)
        query, key = (states.view(len(states), -1, size) for states in (query, key))
        if cos is not None and sin is not None:
            for states in (query, key):
                states.copy_(apply_rotary(states, cos, sin))
        if not batch.is_two_sided:  # then the rows are where they go
            write_kv(key, value.view(len(value), heads.num_kv_heads, value_size), kv, batch)
        return query

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
        heads = HeadLayout(query.shape[1], kv.key_pages.shape[0], query.shape[2])
        output = out
        bias = None
        if distance_bias is not None:
            check_distance_bias(distance_bias, query.shape[1], batch)
            bias = DistanceBias(distance_bias, batch.places_in_prompts)
        scores = Scores(scale, softcap, sinks, bias)
        seen = None if window else seen_blocks(query, kv, batch, scores)
        if batch.key_scores is not None:
            batch.key_scores.clear()
        for work in batch.plan(heads, window):
            attended = attend(
                query, kv, work, heads=heads, how=scores, key_scores=batch.key_scores, seen=seen
            )
            if output is None:
                output = query.new_empty(*query.shape[:2], attended.shape[-1])
            output.index_copy_(0, work.query_rows, attended.to(query.dtype))
        return query.new_empty(query.shape) if output is None else output

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
        total = causal_conv(rows, weight, state, batch, bias=bias)
        return (ACTIVATIONS[activation](total) if activation else total).to(rows.dtype)

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
        gated_delta_rule(qkv, strengths, times, state, batch, heads=heads, out=out)

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
        selective_scan(inputs, times, state, batch, heads=heads, out=out)


def seen_blocks(query: torch.Tensor, kv: KVLayer, batch: AttentionBatch, scores: Scores) -> SeenBlocks | None:
    """Return which key blocks each token of a layer without a window sees; None: all."""
    selection = batch.key_selection
    if selection is None:
        return None
    seen = selected_keys(
        query,
        kv,
        selection,
        num_cached_tokens=batch.num_cached_tokens,
        num_tokens=batch.num_tokens,
        block_tables=batch.block_tables,
        scale=scores.scale,
        softcap=scores.softcap,
    )
    return SeenBlocks(seen, selection.block_size)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: KVLayer, batch: AttentionBatch) -> None:
    """Write the step's keys and values [T, kv_heads, head_dim] to their places, in place.

    Nothing is written of the values if keys are the values.
    """
    places = batch.slot_blocks, batch.slot_offsets
    parts = [(key, kv.key_pages, kv.key_scales)]
    if kv.value_pages is not kv.key_pages:
        parts.append((value, kv.value_pages, kv.value_scales))
    stored = [_as_stored(states, kv) for states, *_ in parts]
    for (numbers, scales), (_, number_pages, scale_pages) in zip(stored, parts, strict=True):
        number_pages.movedim(0, 2)[places] = numbers.to(number_pages.dtype)
        if scales is not None and scale_pages is not None:
            scale_pages.movedim(0, 2)[places] = scales


def _as_stored(states: torch.Tensor, kv: KVLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (states, None) if kv.quantizer is None else kv.quantizer.quantize(states)
