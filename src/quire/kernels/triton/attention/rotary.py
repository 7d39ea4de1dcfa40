"""Norms of heads, the rotary embedding and the KV write in one kernel: a program for some heads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.kv_quantizers import Float8PageQuantizer, Int8PageQuantizer
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.reference import write_kv
from quire.kernels.size_classes import next_power_of_2
from quire.kernels.triton.device import (
    await_previous,
    is_interpreted,
    larger,
    largest_magnitude,
    nearest_float8,
    nearest_int,
    rounded,
)
from quire.kernels.triton.kernel import kernel
from quire.kernels.triton.rows import rms_norm
from quire.kernels.triton.tensors import check_norm_weight, check_rows

_BLOCK = 64 if is_interpreted else 16  # heads of a program
_LARGE_HEAD = 256  # features; of larger ones, a program has a quarter as many


@triton.jit
def _norm_weights(
    q_norm, k_norm, feature, is_feature, is_query, NORMS_Q: tl.constexpr, NORMS_K: tl.constexpr
):
    """Return the weights of the norms of a part of all heads, 1 where there is none."""
    weight = tl.full([is_query.shape[0], feature.shape[0]], 1.0, tl.float32)
    if NORMS_Q:
        of_query = tl.load(q_norm + feature, mask=is_feature, other=0.0)
        weight = tl.where(is_query[:, None], of_query[None, :], weight)
    if NORMS_K:
        of_key = tl.load(k_norm + feature, mask=is_feature, other=0.0)
        weight = tl.where(is_query[:, None], weight, of_key[None, :])
    return weight


@triton.jit
def _write(states, pages, at, mask):
    """Write a part of all heads to its place in each head's page."""
    if pages.dtype.element_ty == tl.int8:
        tl.store(pages + at, nearest_int(states).to(tl.int8), mask=mask)
    elif pages.dtype.element_ty == tl.float8e4nv:
        tl.store(pages + at, nearest_float8(states), mask=mask)
    else:
        tl.store(pages + at, rounded(states, pages.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["num_tokens"])
def _rotary_and_write_kv_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    slot_blocks,
    slot_offsets,
    key_pages,
    key_scales,
    value_pages,
    value_scales,
    num_tokens,
    qkv_stride,
    key_head_stride,
    key_page_stride,
    key_slot_stride,
    key_scale_head_stride,
    key_scale_page_stride,
    key_scale_slot_stride,
    value_head_stride,
    value_page_stride,
    value_slot_stride,
    value_scale_head_stride,
    value_scale_page_stride,
    value_scale_slot_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    ROTATES: tl.constexpr,
    WRITES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    await_previous()
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of all heads of all tokens
    token = (vector // (NUM_HEADS + NUM_KV_HEADS + NUM_VALUE_HEADS)).to(tl.int64)
    head = (vector % (NUM_HEADS + NUM_KV_HEADS + NUM_VALUE_HEADS)).to(tl.int64)
    is_head = token < num_tokens
    is_query = head < NUM_HEADS
    is_turned = is_head & (head < NUM_HEADS + NUM_KV_HEADS)
    is_key = is_turned & (head >= NUM_HEADS)
    is_value = is_head & (head >= NUM_HEADS + NUM_KV_HEADS)
    # A head is three parts: its first features, those that are turned with them, and the others. So a thread
    # stores only what it has loaded, and no thread reads what another has stored.
    in_half = tl.arange(0, HALF_BLOCK)
    in_rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    is_half = in_half < HALF
    is_rest = in_rest < HEAD_DIM
    half_mask = is_head[:, None] & is_half[None, :]
    rest_mask = is_head[:, None] & is_rest[None, :]
    states = qkv + (token * qkv_stride + head * HEAD_DIM)[:, None]
    first = tl.load(states + in_half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(states + HALF + in_half[None, :], mask=half_mask, other=0.0).to(tl.float32)
    rest = tl.load(states + in_rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    # Everything is read before anything is stored: the compiler does not know that these do not overlap.
    if ROTATES:
        angle = token[:, None] * HALF + in_half[None, :]
        cosine = tl.load(cos + angle, mask=half_mask, other=0.0)
        sine = tl.load(sin + angle, mask=half_mask, other=0.0)
    if WRITES:
        block = tl.load(slot_blocks + token, mask=is_head, other=0)
        offset = tl.load(slot_offsets + token, mask=is_head, other=0)
    if NORMS_Q or NORMS_K:
        in_second = HALF + in_half
        first_weight = _norm_weights(q_norm, k_norm, in_half, is_half, is_query, NORMS_Q, NORMS_K)
        second_weight = _norm_weights(q_norm, k_norm, in_second, is_half, is_query, NORMS_Q, NORMS_K)
        rest_weight = _norm_weights(q_norm, k_norm, in_rest, is_rest, is_query, NORMS_Q, NORMS_K)
        squares = (
            tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        )
        is_normed = (is_query & NORMS_Q) | (is_key & NORMS_K)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        by = is_normed[:, None]
        first = tl.where(by, first * inverse * first_weight, first)
        second = tl.where(by, second * inverse * second_weight, second)
        rest = tl.where(by, rest * inverse * rest_weight, rest)
    if ROTATES:
        turned_first = first * cosine - second * sine
        turned_second = second * cosine + first * sine
        first = tl.where(is_turned[:, None], turned_first, first)
        second = tl.where(is_turned[:, None], turned_second, second)
    dtype = qkv.dtype.element_ty
    narrow_first = rounded(first, dtype)
    narrow_second = rounded(second, dtype)
    narrow_rest = rounded(rest, dtype)
    tl.store(states + in_half[None, :], narrow_first, mask=half_mask & is_turned[:, None])
    tl.store(states + HALF + in_half[None, :], narrow_second, mask=half_mask & is_turned[:, None])
    tl.store(states + in_rest[None, :], narrow_rest, mask=rest_mask & is_turned[:, None])
    if WRITES:
        first = narrow_first.to(tl.float32)
        second = narrow_second.to(tl.float32)
        rest = narrow_rest.to(tl.float32)
        is_key &= block >= 0  # which padding rows do not have
        is_value &= block >= 0
        key_head = head - NUM_HEADS
        value_head = head - NUM_HEADS - NUM_KV_HEADS
        if HAS_SCALES:
            limit = larger(largest_magnitude(first, axis=1), largest_magnitude(second, axis=1))
            limit = larger(limit, largest_magnitude(rest, axis=1))
            inverse = tl.math.div_rn(127.0, tl.where(limit > 0.0, limit, 1.0))
            inverse = tl.where(limit > 0.0, inverse, 0.0)[:, None]
            first *= inverse
            second *= inverse
            rest *= inverse
            key_scale = (
                key_head * key_scale_head_stride
                + block * key_scale_page_stride
                + offset * key_scale_slot_stride
            )
            value_scale = (
                value_head * value_scale_head_stride
                + block * value_scale_page_stride
                + offset * value_scale_slot_stride
            )
            limit = tl.math.div_rn(limit, 127.0)
            tl.store(key_scales + key_scale, limit, mask=is_key)
            tl.store(value_scales + value_scale, limit, mask=is_value)
        key_at = (key_head * key_head_stride + block * key_page_stride + offset * key_slot_stride)[:, None]
        value_at = (value_head * value_head_stride + block * value_page_stride + offset * value_slot_stride)[
            :, None
        ]
        half_feature = in_half[None, :]
        rest_feature = in_rest[None, :]
        _write(first, key_pages, key_at + half_feature, half_mask & is_key[:, None])
        _write(second, key_pages, key_at + HALF + half_feature, half_mask & is_key[:, None])
        _write(rest, key_pages, key_at + rest_feature, rest_mask & is_key[:, None])
        _write(first, value_pages, value_at + half_feature, half_mask & is_value[:, None])
        _write(second, value_pages, value_at + HALF + half_feature, half_mask & is_value[:, None])
        _write(rest, value_pages, value_at + rest_feature, rest_mask & is_value[:, None])


def rotary_and_write_kv(
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
    """Do what `KernelSet.rotary_and_write_kv` says.

    Keys and values from a quantizer that is not built in are written by torch.

    Raises:
        TypeError: a type is not as it must be.
        ValueError: a shape is not as it must be.
        IndexError: a token's place is not in the cache.
    """
    num_tokens, width = qkv.shape
    query_width, key_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    check_rows("qkv", qkv)
    half = _half(cos, sin, num_tokens, heads)
    num_value_heads = 0 if kv.value_pages is kv.key_pages else heads.num_kv_heads
    value_width = num_value_heads * heads.head_dim
    if width != query_width + key_width + value_width or kv.key_pages.shape[0] != heads.num_kv_heads:
        raise ValueError(
            f"qkv is {list(qkv.shape)}, the cache's keys {list(kv.key_pages.shape)}, for {heads}"
        )
    query, key = qkv[:, :query_width], qkv[:, query_width : query_width + key_width]
    q_norm = _norm_of_heads(query, q_norm, heads.head_dim, eps)
    k_norm = _norm_of_heads(key, k_norm, heads.head_dim, eps)
    kind = type(kv.quantizer)
    is_built_in = kv.quantizer is None or kind in (Int8PageQuantizer, Float8PageQuantizer)
    stays = batch.is_two_sided  # whose rows are where they go
    writes = is_built_in and not stays
    slot_blocks, slot_offsets = (None, None) if stays else _places(batch, kv, qkv.device)
    num_vectors = num_tokens * (heads.num_heads + heads.num_kv_heads + num_value_heads)
    block = _BLOCK if heads.head_dim <= _LARGE_HEAD else _BLOCK // 4
    if num_tokens and (writes or any(part is not None for part in (cos, q_norm, k_norm))):
        _rotary_and_write_kv_kernel[(-(-num_vectors // block),)](
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            slot_blocks,
            slot_offsets,
            kv.key_pages,
            kv.key_scales,
            kv.value_pages,
            kv.value_scales,
            num_tokens,
            qkv.stride(0),
            *kv.key_pages.stride()[:3],
            *_scale_strides(kv.key_scales),
            *kv.value_pages.stride()[:3],
            *_scale_strides(kv.value_scales),
            eps,
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            NUM_VALUE_HEADS=num_value_heads,
            HEAD_DIM=heads.head_dim,
            HALF=half,
            BLOCK=block,
            HALF_BLOCK=next_power_of_2(max(half, 1)),
            REST_BLOCK=next_power_of_2(max(heads.head_dim - 2 * half, 1)),
            NORMS_Q=q_norm is not None,
            NORMS_K=k_norm is not None,
            ROTATES=cos is not None,
            WRITES=writes,
            HAS_SCALES=kind is Int8PageQuantizer,
            num_warps=2,
            enable_fp_fusion=False,  # of a product and the sum that rounds it
        )
    if not writes and not stays:
        value = qkv[:, query_width + key_width :] if num_value_heads else key  # which is not read again
        shape = num_tokens, heads.num_kv_heads, heads.head_dim
        write_kv(key.view(shape), value.view(shape), kv, batch)
    return query.view(num_tokens, heads.num_heads, heads.head_dim)


def _half(cos: torch.Tensor | None, sin: torch.Tensor | None, num_tokens: int, heads: HeadLayout) -> int:
    """Return how many features are rotated with as many others; half of them if none is."""
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos or sin is missing; both must be given, or neither")
        return heads.head_dim // 2
    half = cos.shape[1]
    for angles in (cos, sin):
        is_row = angles.dtype is torch.float32 and angles.is_contiguous()
        if not is_row or angles.shape != (num_tokens, half) or 2 * half > heads.head_dim:
            raise ValueError(
                f"cos or sin is {angles.dtype} {list(angles.shape)}; both must be float32 [{num_tokens}, at "
                f"most {heads.head_dim // 2}] and contiguous"
            )
    return half


def _norm_of_heads(
    states: torch.Tensor, norm: torch.Tensor | None, head_dim: int, eps: float
) -> torch.Tensor | None:
    """Return a norm over each head; do one over all of them."""
    if norm is None:
        return None
    if norm.shape != (head_dim,):
        rms_norm(states, norm, eps=eps, out=states)
        return None
    check_norm_weight(norm, head_dim)
    return norm


def _places(batch: AttentionBatch, kv: KVLayer, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the blocks of the step's rows and the places in them on a device, checked and copied once."""
    _, num_pages, page_size, _ = kv.key_pages.shape
    make = functools.partial(_checked_places, num_pages, page_size)
    return batch.on_device(("triton slots", num_pages, page_size), make, device).arrays


def _checked_places(num_pages: int, page_size: int, batch: AttentionBatch) -> HostArrays:
    blocks, offsets = batch.slot_blocks.numpy(), batch.slot_offsets.numpy()
    _check_places("slot_blocks", blocks, batch, num_pages)
    _check_places("slot_offsets", offsets, batch, page_size)
    return HostArrays((blocks, offsets))


def _check_places(name: str, places: npt.NDArray[Any], batch: AttentionBatch, limit: int) -> None:
    """Raise unless each token of the step has a place that there is.

    Raises:
        IndexError: a place is out of range.
        ValueError: there are more or fewer places than rows, or they are of another type.
    """
    if places.dtype != np.int64 or places.shape != (batch.num_rows,):
        raise ValueError(
            f"{name} is {places.dtype} {list(places.shape)}; it must be int64 [{batch.num_rows}]"
        )
    places = places[: int(batch.num_tokens.sum())]
    if ((places < 0) | (places >= limit)).any():
        raise IndexError(f"{name} are from {places.min()} to {places.max()}; the cache has {limit}")


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scales is None else scales.stride()[:3]
