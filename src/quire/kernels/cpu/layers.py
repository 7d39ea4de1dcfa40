"""What the native kernels keep of a layer's cache, and of the attention of a step."""

from __future__ import annotations

import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.cpu import _native
from quire.kernels.cpu.tensors import TYPE_NUMBERS, address
from quire.kernels.kv_layer import KVLayer
from quire.kernels.page_quantizers import Int8PageQuantizer

_NAME = "cpu"  # among a layer's handles
_PLAN = "cpu attention"  # among a batch's plans
_KEY_SCORES = "cpu key scores"  # likewise


def native_layer(kv: KVLayer) -> _native.KVLayer:
    """Return the layer's native form.

    Raises:
        TypeError: keys and values differ in type, or have scales but are not int8, or the reverse.
        ValueError: the features of a head are not adjacent, or keys and values differ in shape.
    """
    handle: _native.KVLayer | None = kv.handles.get(_NAME)
    if handle is None:
        handle = kv.handles[_NAME] = _make(kv)
    return handle


def _make(kv: KVLayer) -> _native.KVLayer:
    dtype = kv.key_pages.dtype
    for name, pages, scales in (
        ("keys", kv.key_pages, kv.key_scales),
        ("values", kv.value_pages, kv.value_scales),
    ):
        if pages.dtype != dtype or (scales is None) == (pages.dtype == torch.int8):
            having = "without" if scales is None else "with"
            raise TypeError(
                f"the cache's {name} are {pages.dtype} {having} scales; keys and values must be of one "
                "type, with scales if and only if it is int8"
            )
        if pages.stride(-1) != 1:
            raise ValueError(f"the {name} have strides {pages.stride()}; a head's features must be adjacent")
    if kv.key_pages.shape != kv.value_pages.shape:
        raise ValueError(
            f"keys are {tuple(kv.key_pages.shape)} and values {tuple(kv.value_pages.shape)}; the native "
            "kernels need both of one shape"
        )
    num_kv_heads, _, _, head_dim = kv.key_pages.shape
    return _native.KVLayer(
        TYPE_NUMBERS[dtype],
        num_kv_heads,
        head_dim,
        kv.key_pages.data_ptr(),
        _strides(kv.key_pages),
        kv.value_pages.data_ptr(),
        _strides(kv.value_pages),
        address(kv.key_scales),
        _strides(kv.key_scales),
        address(kv.value_scales),
        _strides(kv.value_scales),
    )


def _strides(pages: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides of page, head and token."""
    if pages is None:
        return 0, 0, 0
    head, page, token = pages.stride()[:3]
    return page, head, token


def is_native(kv: KVLayer) -> bool:
    """Return whether the native kernels know what the layer's numbers mean."""
    return kv.quantizer is None or type(kv.quantizer) is Int8PageQuantizer


def native_plan(batch: AttentionBatch, window: int, group: int) -> _native.AttentionPlan:
    """Return the step's plan for layers of this window and group, made once."""
    key = (_PLAN, window, group)
    plan: _native.AttentionPlan | None = batch.plans.get(key)
    if plan is None:
        tables = batch.block_tables
        skipped = None if window else batch.skipped_keys
        selection = None if window else batch.key_selection
        plan = batch.plans[key] = _native.AttentionPlan(
            batch.num_cached_tokens.ctypes.data,
            batch.num_tokens.ctypes.data,
            len(batch.num_tokens),
            tables.ctypes.data,
            tables.shape[1],
            batch.block_size,
            window,
            group,
            0 if skipped is None else skipped.start.ctypes.data,
            0 if skipped is None else skipped.end.ctypes.data,
            0 if selection is None else selection.end.ctypes.data,
            0 if selection is None else selection.block_size,
            0 if selection is None else selection.stride,
            0.0 if selection is None else selection.threshold,
        )
    return plan


def native_key_scores(batch: AttentionBatch) -> _native.KeyScores | None:
    """Return the native form of where the step's key scores go, made once; None: it has none."""
    scores = batch.key_scores
    if scores is None:
        return None
    native: _native.KeyScores | None = batch.plans.get(_KEY_SCORES)
    if native is None:
        native = batch.plans[_KEY_SCORES] = _native.KeyScores(
            scores.row_starts.ctypes.data,
            scores.sum_starts.ctypes.data,
            scores.rows.data_ptr(),
            scores.sums.data_ptr(),
            scores.rows.numel(),
            scores.sums.numel(),
        )
    return native
