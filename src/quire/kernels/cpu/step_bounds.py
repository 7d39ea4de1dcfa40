"""Which tokens and blocks the arrays of a step refer to: checked once, before kernels read them."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import NOWHERE, KeyScores
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.attention.step_arrays import HostArrays
from quire.kernels.bounds import MAX_STRIDE, TILE
from quire.kernels.cpu.programs import refuse_recording
from quire.kernels.cpu.tensors import check_arrays
from quire.kernels.devices.device import HOST
from quire.kernels.size_classes import coarse_size_class

_NAME = "cpu bounds"  # among a batch's plans
_ARRAYS = "cpu step"  # among its arrays
_OF_ROWS = 0, 0  # in place of the sizes of a cache
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_LARGE = 2**64 - 1  # what -1 is as an unsigned number
_FEW = 32  # of which a list has its maximum sooner than an array
_MAX_PLACES = 2**31 - 1  # the kernels count places in a sequence's cache in 32 bits


class StepBounds:
    """The number of tokens of a step, and the blocks that it reads and writes.

    Raises:
        TypeError: a block size is no integer, or `is_two_sided` neither True nor False.
        ValueError: an array of the batch is of another type or shape than `AttentionBatch` says.
        IndexError: a number in one is out of range.
    """

    def __init__(self, batch: AttentionBatch) -> None:
        if type(batch.block_size) is not int or batch.block_size < 1:
            _check_integer("block_size", batch.block_size, 1)
        if type(batch.is_two_sided) is not bool:
            raise TypeError(f"is_two_sided is {batch.is_two_sided!r}; it must be True or False")
        self.block_size = batch.block_size
        self.num_tokens = _num_tokens(batch)
        highest_slot_block, highest_offset = _highest_slots(batch, self.num_tokens)
        if highest_offset >= self.block_size:
            raise IndexError(f"slot_offsets go to {highest_offset}; blocks have {self.block_size} tokens")
        self._block_tables = batch.block_tables
        self._num_keys = batch.num_cached_tokens + batch.num_tokens
        self._highest_slot_block = highest_slot_block
        # Entries that are never read are left out only if one of them is too high: most tables have 0 there.
        self._highest_block = max(highest_slot_block, _highest(batch.block_tables))
        self._is_exact = False
        if batch.key_scores is not None:
            _check_scores(batch.key_scores, batch, self.num_tokens)
        if batch.skipped_keys is not None:
            _check_skipped(batch.skipped_keys, batch)
        if batch.key_selection is not None:
            _check_selection(batch.key_selection, len(batch.num_tokens))

    def check_cache(self, num_blocks: int, block_size: int) -> None:
        """Raise unless the step stays within a cache of these sizes.

        Raises:
            ValueError: blocks have another size than the batch says.
            IndexError: a block id is out of range.
        """
        if block_size != self.block_size:
            raise ValueError(
                f"the cache has blocks of {block_size} tokens, and the batch of {self.block_size}"
            )
        if self._highest_block < num_blocks:
            return
        if not self._is_exact:
            self._is_exact = True
            self._highest_block = max(self._highest_slot_block, self._highest_that_is_read())
        if self._highest_block >= num_blocks:
            raise IndexError(f"the step names block {self._highest_block}; the cache has {num_blocks} blocks")

    def _highest_that_is_read(self) -> int:
        num_entries = -(-self._num_keys // self.block_size)
        is_read = np.arange(self._block_tables.shape[1]) < num_entries[:, None]
        return _highest(self._block_tables[is_read])


def step_bounds(batch: AttentionBatch) -> StepBounds:
    """Return the bounds of a step, found once."""
    bounds: StepBounds | None = batch.plans.get(_NAME)
    if bounds is None:
        bounds = batch.plans[_NAME] = StepBounds(batch)
    return bounds


class StepAddresses(NamedTuple):
    """Where kernels read what `AttentionBatch` has under these names."""

    slot_blocks: int
    slot_offsets: int
    num_cached_tokens: int
    num_tokens: int
    block_tables: int
    table_stride: int  # entries of a sequence


def step_addresses(batch: AttentionBatch, num_blocks: int, block_size: int) -> StepAddresses:
    """Return the addresses of a step's arrays, for a cache of these sizes.

    Raises:
        TypeError, ValueError, IndexError: see `StepBounds`.
    """
    sizes = num_blocks, block_size
    if batch.step_arrays is not None:
        if batch.is_two_sided:  # its rows are the cache, so that each step may have a cache of another size
            step_bounds(batch).check_cache(*sizes)
            sizes = _OF_ROWS
        make = functools.partial(_arrays_to_replay, sizes=sizes)
        *vectors, tables = batch.on_device((_ARRAYS, sizes), make, HOST).arrays
        blocks, offsets, cached, counts = (each.data_ptr() for each in vectors)
        return StepAddresses(blocks, offsets, cached, counts, tables.data_ptr(), tables.shape[1])
    refuse_recording("a step whose arrays are its own")
    step_bounds(batch).check_cache(*sizes)
    return StepAddresses(
        batch.slot_blocks.data_ptr(),
        batch.slot_offsets.data_ptr(),
        batch.num_cached_tokens.ctypes.data,
        batch.num_tokens.ctypes.data,
        batch.block_tables.ctypes.data,
        batch.block_tables.shape[1],
    )


def _arrays_to_replay(batch: AttentionBatch, sizes: tuple[int, int]) -> HostArrays:
    """Return what is behind a step's addresses, checked, in sizes that few steps differ in."""
    if sizes is not _OF_ROWS:
        step_bounds(batch).check_cache(*sizes)
    num_sequences, width = batch.block_tables.shape
    tables = np.zeros((num_sequences, coarse_size_class(width)), dtype=np.int32)
    tables[:, :width] = batch.block_tables
    return HostArrays(
        (
            batch.slot_blocks.numpy(),
            batch.slot_offsets.numpy(),
            batch.num_cached_tokens,
            batch.num_tokens,
            tables,
        ),
        (int(batch.num_tokens.max()),) if batch.is_two_sided else (),  # see `AttentionBatch.effective_window`
    )


def _num_tokens(batch: AttentionBatch) -> int:
    """Return the tokens of all sequences."""
    counts, cached, tables = batch.num_tokens, batch.num_cached_tokens, batch.block_tables
    num_sequences = len(counts)
    width = tables.shape[-1] if tables.ndim else 0
    check_arrays(
        ("num_tokens", counts, _INT64, (num_sequences,)),
        ("num_cached_tokens", cached, _INT64, (num_sequences,)),
        ("block_tables", tables, _INT32, (num_sequences, width)),
    )
    most = _MAX_PLACES // 2 if batch.is_two_sided else _MAX_PLACES  # with as many places behind the last
    capacity = min(width * batch.block_size, most)
    lengths, starts = counts.tolist(), cached.tolist()  # far sooner than arrays for few sequences
    if not num_sequences:
        return 0
    if min(lengths) < 1 or min(starts) < 0 or max(map(operator.add, lengths, starts)) > capacity:
        raise IndexError(
            f"num_tokens is from {min(lengths)} to {max(lengths)}, num_cached_tokens from {min(starts)} to "
            f"{max(starts)}; at least 1 and 0 are needed, and a sum of at most {capacity}, which tables have "
            "room for"
        )
    return sum(lengths)


def _check_scores(scores: KeyScores, batch: AttentionBatch, num_tokens: int) -> None:
    """Raise unless every row and every sum lies within its tensor."""
    tensors = ("rows", scores.layer_rows, torch.float32), ("sums", scores.layer_sums, torch.int64)
    for name, tensor, dtype in tensors:
        is_for_layers = tensor.dim() == 2 and not tensor.shape[1] % TILE
        if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu or not is_for_layers:
            raise ValueError(
                f"the key scores' {name} are {tensor.dtype} {list(tensor.shape)}; they must be {dtype}, "
                f"contiguous, and a multiple of {TILE} for each layer"
            )
    num_keys = batch.num_cached_tokens + batch.num_tokens
    lengths = np.repeat(-(-num_keys // TILE) * TILE, batch.num_tokens)
    for name, starts, size in (
        ("row_starts", scores.row_starts, scores.layer_rows.shape[1]),
        ("sum_starts", scores.sum_starts, scores.layer_sums.shape[1]),
    ):
        check_arrays((name, starts, _INT64, (num_tokens,)))
        is_outside = (starts != NOWHERE) & ((starts < 0) | (starts > size - lengths))
        if is_outside.any():
            first = int(is_outside.argmax())
            raise IndexError(
                f"{name}[{first}] is {starts[first]}; {lengths[first]} numbers follow it, of {size} in all"
            )


def _check_skipped(skipped: SkippedKeys, batch: AttentionBatch) -> None:
    for name, places in (("start", skipped.start), ("end", skipped.end)):
        check_arrays((f"skipped_keys.{name}", places, _INT64, (len(batch.num_tokens),)))
    is_any = skipped.is_any
    _check_highest("skipped_keys.start", skipped.start[is_any], _MAX_PLACES)
    is_new = skipped.end[is_any] > batch.num_cached_tokens[is_any]
    if is_new.any():
        raise IndexError("skipped_keys.end goes beyond the tokens that were cached before the step")


def _check_selection(selection: KeySelection, num_sequences: int) -> None:
    check_arrays(("key_selection.end", selection.end, _INT64, (num_sequences,)))
    _check_integer("key_selection.block_size", selection.block_size, TILE)
    _check_integer("key_selection.stride", selection.stride, 1)
    size, stride = selection.block_size, selection.stride
    if size % TILE or size > _MAX_PLACES or stride > MAX_STRIDE or size % stride:
        raise ValueError(
            f"key_selection has blocks of {size} tokens and stride {stride}; blocks must be a multiple of "
            f"{TILE} and of the stride, which is at most {MAX_STRIDE}"
        )


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _highest_slots(batch: AttentionBatch, num_tokens: int) -> tuple[int, int]:
    """Return the highest block and the highest offset that tokens are written to; see `_highest`."""
    highest = []
    for name, places in ("slot_blocks", batch.slot_blocks), ("slot_offsets", batch.slot_offsets):
        is_row = places.shape == (num_tokens,) and places.is_contiguous() and places.is_cpu
        if places.dtype is not torch.int64 or not is_row:
            raise ValueError(
                f"{name} is {places.dtype} {list(places.shape)} with strides {places.stride()} on "
                f"{places.device}; it must be int64 [{num_tokens}] and contiguous, on the CPU"
            )
        highest.append(_highest(places.numpy()))
    return highest[0], highest[1]


def _highest(numbers: npt.NDArray[Any]) -> int:
    """Return the highest of integers, where negative ones count as large; -1: there are none."""
    if numbers.size <= _FEW:
        few = numbers.ravel().tolist()
        if not few:
            return -1
        return _LARGE if min(few) < 0 else max(few)
    unsigned = numbers.view(np.uint64 if numbers.itemsize == 8 else np.uint32)
    return int(np.maximum.reduce(unsigned, axis=None))


def _check_highest(name: str, numbers: npt.NDArray[Any], limit: int) -> None:
    if _highest(numbers) > limit:
        raise IndexError(f"{name} is from {numbers.min()} to {numbers.max()}; 0 to {limit} is allowed")
