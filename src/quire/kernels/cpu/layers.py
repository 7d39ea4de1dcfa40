"""What the native kernels keep of a layer's cache, and of the attention of a step."""

from __future__ import annotations

import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.kv_quantizers import Int4PageQuantizer, Int8PageQuantizer
from quire.kernels.bounds import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from quire.kernels.cpu import _native
from quire.kernels.cpu.step_bounds import StepAddresses, step_addresses, step_bounds
from quire.kernels.cpu.tensors import TYPE_NUMBERS, address, check_on_cpu, form_of

LAYER = "cpu"  # among a layer's handles
PLAN = "cpu attention"  # among a batch's plans
CACHE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_SCALED_TYPES = (torch.int8, torch.uint8)


class NativeLayer:
    """A layer's cache as the native kernels know it.

    Raises:
        TypeError: keys and values differ in type, or have scales but are not int8 or int4, or the reverse.
        ValueError: the features of a head are not adjacent, or keys, values or scales differ in shape, but
            for the features of a head.
    """

    def __init__(self, kv: KVLayer) -> None:
        keys, values = kv.key_pages, kv.value_pages
        is_int4 = type(kv.quantizer) is Int4PageQuantizer
        _check_pages("keys", keys, kv.key_scales, (torch.uint8,) if is_int4 else CACHE_TYPES)
        _check_pages("values", values, kv.value_scales, (keys.dtype,))
        if keys.shape[:-1] != values.shape[:-1]:
            raise ValueError(
                f"keys are {tuple(keys.shape)} and values {tuple(values.shape)}; both must be of one shape "
                "but for the features of a head"
            )
        features = 2 if is_int4 else 1  # in one number
        self.head_dim, self.value_dim = features * keys.shape[-1], features * values.shape[-1]
        self.shape = torch.Size((*keys.shape[:-1], self.head_dim))
        self.keys_are_values = values is keys
        self.num_kv_heads, self.num_blocks, self.block_size, _ = keys.shape
        self.native = _native.KVLayer(
            _native.DType.int4.value if is_int4 else TYPE_NUMBERS[keys.dtype],
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            keys.data_ptr(),
            _strides(keys),
            values.data_ptr(),
            _strides(values),
            address(kv.key_scales),
            _strides(kv.key_scales),
            address(kv.value_scales),
            _strides(kv.value_scales),
        )


def native_layer(kv: KVLayer) -> NativeLayer | None:
    """Return the layer's native form, made once; None: the native kernels cannot read its numbers.

    Raises:
        TypeError, ValueError: see `NativeLayer`.
    """
    handle: NativeLayer | None = kv.handles.get(LAYER)
    if handle is None and _is_native(kv):
        handle = kv.handles[LAYER] = NativeLayer(kv)
    return handle


def _is_native(kv: KVLayer) -> bool:
    if type(kv.quantizer) is Int4PageQuantizer:  # whose vectors are rotated sixteen features at a time
        sizes = (2 * pages.shape[-1] for pages in (kv.key_pages, kv.value_pages))
        return all(size <= MAX_HEAD_DIM and not size % HEAD_DIM_MULTIPLE for size in sizes)
    return kv.quantizer is None or type(kv.quantizer) is Int8PageQuantizer


def _check_pages(
    name: str, pages: torch.Tensor, scales: torch.Tensor | None, types: tuple[torch.dtype, ...]
) -> None:
    if pages.dtype not in types or (scales is None) == (pages.dtype in _SCALED_TYPES):
        having = "without" if scales is None else "with"
        raise TypeError(
            f"the cache's {name} are {pages.dtype} {having} scales; keys and values must be of one type of "
            "floats, int8 with scales, or with Int4PageQuantizer uint8 with scales"
        )
    check_on_cpu(f"the cache's {name}", form_of(pages))
    if pages.dim() != 4 or pages.stride(-1) != 1:
        raise ValueError(
            f"the {name} are {list(pages.shape)} with strides {pages.stride()}; they must be [KV heads, "
            "pages, tokens, features], and a head's features adjacent"
        )
    if scales is None:
        return
    check_on_cpu(f"the scales of {name}", form_of(scales))
    if scales.dtype != torch.float32 or scales.shape != pages.shape[:3]:
        raise ValueError(
            f"the scales of {name} are {scales.dtype} {list(scales.shape)}; they must be float32 "
            f"{list(pages.shape[:3])}"
        )


def _strides(pages: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides of page, head and token."""
    if pages is None:
        return 0, 0, 0
    head, page, token = pages.stride()[:3]
    return page, head, token


def attention_plan(
    batch: AttentionBatch, layer: NativeLayer, query_shape: torch.Size, window: int
) -> _native.AttentionPlan:
    """Return the plan of a step for layers and queries of these shapes.

    It is checked once, and then among the batch's plans as `(PLAN, window, query_shape, layer.shape)`.

    Raises:
        TypeError, ValueError, IndexError: they do not, or see `StepBounds` and `native_plan`.
    """
    bounds, addresses = step_bounds(batch), step_addresses(batch, layer.num_blocks, layer.block_size)
    num_heads = query_shape[1]
    group = num_heads // layer.num_kv_heads if layer.num_kv_heads else 0
    if query_shape != (bounds.num_tokens, group * layer.num_kv_heads, layer.head_dim):
        raise ValueError(
            f"the query is {list(query_shape)}; it must be [{bounds.num_tokens}, a multiple of "
            f"{layer.num_kv_heads}, {layer.head_dim}] for this step and cache"
        )
    plan = batch.plans[PLAN, window, query_shape, layer.shape] = native_plan(batch, addresses, window, group)
    return plan


def native_plan(
    batch: AttentionBatch, addresses: StepAddresses, window: int, group: int
) -> _native.AttentionPlan:
    """Return the step's plan for layers of this window and group, made once.

    Raises:
        ValueError: window or group is out of range.
    """
    key = (PLAN, window, group)
    plan: _native.AttentionPlan | None = batch.plans.get(key)
    if plan is None:
        if window < 0 or group < 1:
            raise ValueError(
                f"window is {window} and {group} query heads share a KV head; they must be at least 0 and 1"
            )
        window = batch.effective_window(window)
        skipped = None if window else batch.skipped_keys
        selection = None if window else batch.key_selection
        plan = batch.plans[key] = _native.AttentionPlan(
            addresses.num_cached_tokens,
            addresses.num_tokens,
            len(batch.num_tokens),
            addresses.block_tables,
            addresses.table_stride,
            batch.block_size,
            window,
            group,
            0 if skipped is None else skipped.start.ctypes.data,
            0 if skipped is None else skipped.end.ctypes.data,
            0 if selection is None else selection.end.ctypes.data,
            0 if selection is None else selection.block_size,
            0 if selection is None else selection.stride,
            0.0 if selection is None else selection.threshold,
            batch.is_two_sided,
        )
    return plan


def native_key_scores(scores: KeyScores) -> _native.KeyScores:
    """Return the native form of where a layer's key scores go."""
    rows, sums = scores.rows, scores.sums
    return _native.KeyScores(
        scores.row_starts.ctypes.data,
        scores.sum_starts.ctypes.data,
        rows.data_ptr(),
        sums.data_ptr(),
        rows.numel(),
        sums.numel(),
    )
