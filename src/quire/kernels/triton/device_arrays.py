"""What the host plans of a step, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.batch import AttentionBatch

_TABLES = "triton block tables"  # among a batch's plans


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device; nobody waits for the copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def block_tables(batch: AttentionBatch, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return the step's block tables [S, max_blocks] int32 on a device, checked and copied once.

    Raises:
        IndexError: they end before a sequence does, or name a block that `num_blocks` do not include.
    """
    key = _TABLES, num_blocks
    tables: torch.Tensor | None = batch.plans.get(key)
    if tables is None:
        _check_tables(batch, num_blocks)
        tables = batch.plans[key] = to_device(batch.block_tables, device)
    return tables


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
