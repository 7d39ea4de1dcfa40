"""A device that there is everywhere: torch's meta device, whose tensors have shapes and no numbers.

Asking one for its numbers raises, as `.item()`, `.cpu()` and `.numpy()` do. `OneDevice` raises where tensors
of two devices meet, which torch allows now and then: an index may be the host's, and then the host waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.devices.device import to_device
from quire.kernels.layers.experts import Experts, ExpertWeights, Mixture
from quire.kernels.layers.linear import FloatLinear, Linear
from quire.kernels.layers.recurrence import DeltaHeads, ScanHeads
from quire.kernels.layers.weights import Weight, dequantize
from quire.kernels.reference import ReferenceKernels
from quire.kernels.sampling.token_choice import RowLogprobs, TokenChoice

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """While it is entered, a tensor gets to the device by a copy only, and these are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _devices((args, kwargs)), _devices(result)
        if given == {"cpu"} and made == {"meta"}:
            assert func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy), func
            self.num_copies += 1
        else:
            assert len(given | made) < 2, f"{func} takes tensors on the host and on the device"
        return result


def _devices(tree: Any) -> set[str]:
    """Return the devices of the tensors of `tree`, but for single numbers, which any operator may take."""
    leaves = tree_leaves(tree)
    return {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}


class MetaExperts(Experts):
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert scores.device == rows.device
        return rows.new_empty(rows.shape) if out is None else out.copy_(rows)


class MetaChoice(TokenChoice):
    """Chooses tokens that are no numbers."""

    def choose(self, logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(dim=1), logits.amax(dim=1)

    def logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_likeliest: int, rows: torch.Tensor
    ) -> RowLogprobs:
        assert logits.device == chosen.device == rows.device
        shape = len(rows), 1 + num_likeliest
        ids, values = (torch.empty(shape, dtype=dtype, device=META) for dtype in (torch.int64, torch.float64))
        return RowLogprobs(ids, values, ids[:, 0], logits[rows].amax(dim=1))


class MadeUpCopy:
    """Stands for `HostCopy`: copies have numbers of the test's own."""

    generator = torch.Generator().manual_seed(0)
    has_arrived = True

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.device == META
        if tensor.dtype.is_floating_point:
            self._numbers = torch.rand(tensor.shape, generator=self.generator)
        else:
            self._numbers = torch.randint(0, 100, tensor.shape, generator=self.generator)

    def wait(self) -> torch.Tensor:
        return self._numbers


class MetaKernels(ReferenceKernels):
    """Kernels that compute nothing, on tensors of the right shapes."""

    name = "meta"
    device = META
    sampling = MetaChoice()

    def linear(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        **_: Any,
    ) -> Linear:
        on_device = [
            (part if isinstance(part, torch.Tensor) else dequantize(part)).to(META) for part in parts
        ]
        return FloatLinear(on_device, None if bias is None else bias.to(META), dtype)

    def experts(self, weights: Iterable[ExpertWeights], mixture: Mixture, **_: Any) -> Experts:
        assert len(list(weights)) == mixture.num_experts
        return MetaExperts()

    def rotary_and_write_kv(
        self, qkv: torch.Tensor, kv: KVLayer, batch: AttentionBatch, **options: Any
    ) -> torch.Tensor:
        places: AttentionBatch | None = batch.plans.get("meta")
        if places is None:
            blocks, offsets = (to_device(part, META) for part in (batch.slot_blocks, batch.slot_offsets))
            places = dataclasses.replace(batch, slot_blocks=blocks, slot_offsets=offsets)
            batch.plans["meta"] = places
        return super().rotary_and_write_kv(qkv, kv, places, **options)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        out: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        assert kv.key_pages.device == query.device
        return query.new_empty(query.shape) if out is None else out.copy_(query[..., :1])

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
        assert weight.device == state.device == rows.device
        assert bias is None or bias.device == rows.device
        return rows.new_empty(rows.shape)

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
        given = qkv, strengths, times, state, heads.decay, heads.time_bias, out
        assert {tensor.device for tensor in given} == {META}

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
        given = inputs, times, state, heads.decay, heads.time_bias, heads.skip, out
        assert {tensor.device for tensor in given} == {META}
