"""What the host plans of a step, on the device."""

from __future__ import annotations

import functools

import numpy as np
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.step_arrays import HostArrays


def block_tables(batch: AttentionBatch, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return the step's block tables [S or more, max_blocks or more] int32 on a device, checked once.

    Raises:
        IndexError: they end before a sequence does, or name a block that `num_blocks` do not include.
    """
    make = functools.partial(_padded_tables, num_blocks)
    return batch.on_device(("triton block tables", num_blocks), make, device).arrays[0]


def _padded_tables(num_blocks: int, batch: AttentionBatch) -> HostArrays:
    _check_tables(batch, num_blocks)
    num_sequences, width = batch.block_tables.shape
    shape = batch.sizes.rows(num_sequences), batch.sizes.rows(width)
    tables = np.zeros(shape, dtype=np.int32)
    tables[:num_sequences, :width] = batch.block_tables
    return HostArrays((tables,))


def _check_tables(batch: AttentionBatch, num_blocks: int) -> None:
    tables = batch.block_tables
    num_entries = -(-(batch.num_cached_tokens + batch.num_tokens) // batch.block_size)
    most = int(num_entries.max(initial=0))
    if most > tables.shape[1]:
        raise IndexError(f"a sequence fills {most} blocks; the step's tables have room for {tables.shape[1]}")
    highest = tables.view(np.uint32).max(initial=0)  # what is negative counts as large
    if highest >= num_blocks:  # which is no error where it is not read
        highest = tables.view(np.uint32)[np.arange(tables.shape[1]) < num_entries[:, None]].max(initial=0)
        if highest >= num_blocks:
            raise IndexError(f"the step names block {highest}; the cache has {num_blocks} blocks")
