"""The part of `rotary_and_write_kv` that is checked and looked up once for each step or layer."""

from __future__ import annotations

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.layers import NativeLayer, native_layer
from quire.kernels.cpu.step_bounds import step_addresses, step_bounds
from quire.kernels.cpu.tensors import address, check_on_cpu, check_vector, form_of

ROTARY = "cpu rotary"  # among a layer's handles and a batch's plans


def rotary_step(
    batch: AttentionBatch, cos: torch.Tensor | None, sin: torch.Tensor | None, layer: RotaryLayer
) -> RotaryStep:
    """Return what depends on the step and these angles; from now on, it is among the batch's plans."""
    step = batch.plans[ROTARY, id(cos)] = RotaryStep(batch, cos, sin, layer)
    return step


def rotary_layer(
    kv: KVLayer, heads: HeadLayout, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
) -> RotaryLayer | None:
    """Return what depends on the layer; from now on, it is among its handles. None: see `native_layer`."""
    native = native_layer(kv)
    if native is None:
        return None
    layer = kv.handles[ROTARY] = RotaryLayer(native, heads, q_norm, k_norm)
    return layer


class RotaryStep:
    """The part of a call that depends on step and angles only; holds these, so that ids stay unique."""

    def __init__(
        self,
        batch: AttentionBatch,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        layer: RotaryLayer,
    ) -> None:
        self.bounds = step_bounds(batch)
        self.num_rows = self.bounds.num_tokens
        self.cos, self.sin = cos, sin
        self.half = self.cos_address = self.sin_address = 0
        if cos is not None and sin is not None:
            self.half = cos.shape[1]
            _check_angles(cos, sin, (self.num_rows, self.half))
            self.cos_address, self.sin_address = cos.data_ptr(), sin.data_ptr()
        elif cos is not sin:
            raise ValueError("cos or sin is missing; both must be given, or neither")
        _, num_blocks, block_size, _ = layer.shape
        addresses = step_addresses(batch, num_blocks, block_size)
        self.blocks_address, self.offsets_address = addresses.slot_blocks, addresses.slot_offsets
        self.fitting: set[torch.Size] = set()  # shapes of pages that the step has been found to stay within


class RotaryLayer:
    """The part of a call that depends on the layer only."""

    def __init__(
        self,
        layer: NativeLayer,
        heads: HeadLayout,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        self.native, self.shape = layer.native, layer.shape
        if heads.num_heads < 1:
            raise ValueError(f"there are {heads.num_heads} query heads; there must be at least 1")
        if heads.value_size != (0 if layer.keys_are_values else layer.value_dim):
            raise ValueError(f"{heads} has values of another size than the {layer.value_dim} in the cache")
        self.width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        self.width += heads.num_kv_heads * heads.value_size
        self.heads, self.q_norm, self.k_norm = heads, q_norm, k_norm
        self.q_norm_address, self.k_norm_address = address(q_norm), address(k_norm)
        self.q_norm_size = _norm_size("q_norm", q_norm, heads.num_heads, heads.head_dim)
        self.k_norm_size = _norm_size("k_norm", k_norm, heads.num_kv_heads, heads.head_dim)
        if (layer.num_kv_heads, layer.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(f"the cache's keys are {tuple(layer.shape)}; they do not fit {heads}")

    def check(self, step: RotaryStep) -> None:
        """Raise `IndexError` or `ValueError` if a step goes beyond the layer's heads or pages."""
        _, num_blocks, block_size, head_dim = self.shape
        if 2 * step.half > head_dim:
            raise ValueError(
                f"cos and sin have {step.half} angles for each token; a head of {head_dim} features has at "
                f"most {head_dim // 2}"
            )
        step.bounds.check_cache(num_blocks, block_size)
        step.fitting.add(self.shape)


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, shape: tuple[int, int]) -> None:
    for angles in (cos, sin):
        if angles.dtype is not torch.float32 or angles.shape != shape or not angles.is_contiguous():
            raise ValueError(
                f"cos or sin is {angles.dtype} {tuple(angles.shape)} with strides {angles.stride()}; both "
                f"must be float32 {list(shape)} and contiguous"
            )
        if not angles.is_cpu:
            check_on_cpu("cos or sin", form_of(angles))


def _norm_size(name: str, norm: torch.Tensor | None, num_heads: int, head_dim: int) -> int:
    """Return how many features are normalized together."""
    if norm is None:
        return 0
    size = norm.numel()
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(f"{name} is [{size}]; it must be [{head_dim}] or [{num_heads * head_dim}]")
    check_vector(name, form_of(norm), size)
    return size
