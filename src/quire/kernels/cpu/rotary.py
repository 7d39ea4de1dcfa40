"""What of a call of `rotary_and_write_kv` is checked and looked up once for each step or each layer."""

from __future__ import annotations

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.layers import native_layer
from quire.kernels.cpu.step_bounds import step_bounds
from quire.kernels.cpu.tensors import address, check_norm_weight, check_on_cpu

_NAME = "cpu rotary"  # among a layer's handles and a batch's plans


def rotary_step(batch: AttentionBatch, cos: torch.Tensor | None, sin: torch.Tensor | None) -> RotaryStep:
    """Return what depends on the step and these angles, made once."""
    step: RotaryStep | None = batch.plans.get((_NAME, id(cos)))
    if step is None or step.sin is not sin:
        step = batch.plans[_NAME, id(cos)] = RotaryStep(batch, cos, sin)
    return step


def rotary_layer(
    kv: KVLayer, heads: HeadLayout, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
) -> RotaryLayer:
    """Return what depends on the layer, made once."""
    layer: RotaryLayer | None = kv.handles.get(_NAME)
    if layer is None or not layer.is_of(heads, q_norm, k_norm):
        layer = kv.handles[_NAME] = RotaryLayer(kv, heads, q_norm, k_norm)
    return layer


class RotaryStep:
    """What of a call depends on the step and the angles only; holds these, so that their id stays theirs."""

    def __init__(self, batch: AttentionBatch, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
        self.bounds = step_bounds(batch)
        self.num_rows = self.bounds.num_tokens
        self.cos, self.sin = cos, sin
        self.half, self.cos_address, self.sin_address = 0, address(cos), address(sin)
        if (cos is None) != (sin is None):
            raise ValueError("cos or sin is missing; both must be given, or neither")
        if cos is not None and sin is not None:
            self.half = cos.shape[1]
            for angles in (cos, sin):
                _check_angles(angles, (self.num_rows, self.half))
        self.blocks_address = batch.slot_blocks.data_ptr()
        self.offsets_address = batch.slot_offsets.data_ptr()


class RotaryLayer:
    """What of a call depends on the layer only."""

    def __init__(
        self,
        kv: KVLayer,
        heads: HeadLayout,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        self._layer = native_layer(kv)
        self.native = self._layer.native
        if heads.num_heads < 1:
            raise ValueError(f"there are {heads.num_heads} query heads; there must be at least 1")
        self.width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.heads, self.q_norm, self.k_norm = heads, q_norm, k_norm
        self.q_norm_address, self.k_norm_address = address(q_norm), address(k_norm)
        self.q_norm_size = _norm_size("q_norm", q_norm, heads.num_heads, heads.head_dim)
        self.k_norm_size = _norm_size("k_norm", k_norm, heads.num_kv_heads, heads.head_dim)
        if (self._layer.num_kv_heads, self._layer.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(f"the cache's keys are {tuple(kv.key_pages.shape)}; they do not fit {heads}")

    def is_of(self, heads: HeadLayout, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> bool:
        """Return whether it was made of these very objects."""
        return self.heads is heads and self.q_norm is q_norm and self.k_norm is k_norm

    def check(self, step: RotaryStep) -> None:
        """Raise `IndexError` or `ValueError` if a step goes beyond the layer's heads or pages."""
        if 2 * step.half > self.heads.head_dim:
            raise ValueError(
                f"cos and sin have {step.half} angles for each token; a head of {self.heads.head_dim} "
                f"features has at most {self.heads.head_dim // 2}"
            )
        self._layer.check(step.bounds)


def _check_angles(angles: torch.Tensor, shape: tuple[int, int]) -> None:
    if angles.dtype is not torch.float32 or angles.shape != shape:
        raise ValueError(
            f"cos or sin is {angles.dtype} {tuple(angles.shape)}; both must be float32 {list(shape)}"
        )
    check_on_cpu("cos or sin", angles)
    if not angles.is_contiguous():
        raise ValueError(f"cos or sin has strides {angles.stride()}; both must be contiguous")


def _norm_size(name: str, norm: torch.Tensor | None, num_heads: int, head_dim: int) -> int:
    """Return how many features are normalized together."""
    if norm is None:
        return 0
    size = norm.numel()
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(f"{name} is [{size}]; it must be [{head_dim}] or [{num_heads * head_dim}]")
    check_norm_weight(norm, size)
    return size
