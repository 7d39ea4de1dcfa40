"""The part of `rotary_and_write_kv` that is checked and looked up once for each step or layer."""

from __future__ import annotations

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.layers import NativeLayer, native_layer
from quire.kernels.cpu.step_bounds import step_addresses, step_bounds
from quire.kernels.cpu.tensors import (
    Form,
    address,
    check_contiguous,
    check_vector,
    checked_once,
    float_type,
    form_of,
    written_row_stride,
)

ROTARY = "cpu rotary"  # among a layer's handles and a batch's plans
_ONE_MISSING = "cos or sin is missing; both must be given, or neither"


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
            _check_angles(form_of(cos), form_of(sin), (self.num_rows, self.half))
            self.cos_address, self.sin_address = cos.data_ptr(), sin.data_ptr()
        elif cos is not sin:
            raise ValueError(_ONE_MISSING)
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
        self.q_norm_size = _norm_size("q_norm", _form(q_norm), heads.num_heads, heads.head_dim)
        self.k_norm_size = _norm_size("k_norm", _form(k_norm), heads.num_kv_heads, heads.head_dim)
        if (layer.num_kv_heads, layer.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(f"the cache's keys are {tuple(layer.shape)}; they do not fit {heads}")

    def check(self, step: RotaryStep) -> None:
        """Raise `IndexError` or `ValueError` if a step goes beyond the layer's heads or pages."""
        _, num_blocks, block_size, head_dim = self.shape
        _check_half(step.half, head_dim)
        step.bounds.check_cache(num_blocks, block_size)
        step.fitting.add(self.shape)


@checked_once
def rotary_numbers(
    states: Form, cos: Form | None, sin: Form | None, norm: Form | None, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Return the type, rows, stride and heads of states, the angles of each row, and a norm's features."""
    num_rows, width = states[0]
    if head_dim < 1 or width % head_dim:
        raise ValueError(f"rows have {width} features; they must be whole heads of {head_dim}")
    stride, num_heads = written_row_stride("states", states, (num_rows, width)), width // head_dim
    half = 0
    if cos is not None and sin is not None:
        half = cos[0][1]
        _check_angles(cos, sin, (num_rows, half))
        _check_half(half, head_dim)
    elif cos is not sin:
        raise ValueError(_ONE_MISSING)
    norm_size = _norm_size("norm", norm, num_heads, head_dim)
    return float_type("states", states), num_rows, stride, num_heads, half, norm_size


def _form(tensor: torch.Tensor | None) -> Form | None:
    return None if tensor is None else form_of(tensor)


def _check_angles(cos: Form, sin: Form, shape: tuple[int, int]) -> None:
    for form in (cos, sin):
        if form[2] is not torch.float32:
            raise TypeError(f"cos or sin is {form[2]}; both must be float32")
        check_contiguous("cos or sin", form, shape)


def _check_half(half: int, head_dim: int) -> None:
    if 2 * half > head_dim:
        raise ValueError(
            f"cos and sin have {half} angles for each token; a head of {head_dim} features has at most "
            f"{head_dim // 2}"
        )


def _norm_size(name: str, norm: Form | None, num_heads: int, head_dim: int) -> int:
    """Return how many features are normalized together."""
    if norm is None:
        return 0
    (size,) = norm[0]
    if size not in (head_dim, num_heads * head_dim):
        raise ValueError(f"{name} is [{size}]; it must be [{head_dim}] or [{num_heads * head_dim}]")
    check_vector(name, norm, size)
    return size
