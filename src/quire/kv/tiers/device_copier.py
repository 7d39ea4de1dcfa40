"""Blocks of a KV cache in a device's memory, on their way to host memory and back beside the steps.

A device has queues, and an order between two of them only where one waits for a point in the other. Steps are
in the queue of what it computes; loads and saves have one each:

- A save first copies its blocks within the device, in the queue of the steps: behind the one that filled the
  blocks, and before any that overwrites them. From there they go to pinned host memory beside later steps.
- A load writes to its blocks behind the steps that may still use them. It is reported once it has ended, so
  that steps which read the blocks come later by themselves.
- A load that is cancelled has later steps wait on the device for what it is writing at that moment.

The thread that asks for steps waits for none of this.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch

from quire.kernels.devices.copy_device import CopyDevice, DevicePoint, Point
from quire.kv.blocks.prompt_blocks import BlockIds
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.block_copier import BlockParts, IncomingBlock, OutgoingBlock, num_staged_blocks

logger = logging.getLogger(__name__)


class DeviceCopier(Generic[Point]):
    """`BlockCopier` of caches in a device's memory.

    Args:
        caches: of each group, [num_blocks, ...] of the device, contiguous.
        device: copies.
    """

    def __init__(self, caches: Sequence[torch.Tensor], device: CopyDevice[Point]) -> None:
        self._blocks = [cache.flatten(1).view(torch.uint8) for cache in caches]
        self._parts = BlockParts([blocks.shape[1] for blocks in self._blocks])
        self.bytes_per_block = self._parts.num_bytes
        self._device = device
        num_slots = num_staged_blocks(self.bytes_per_block)
        self.slots = SlotRing(num_slots)
        self._words = [_in_words(blocks) for blocks in self._blocks]  # wider numbers are gathered faster
        self._staged = [words.new_empty(num_slots, words.shape[1]) for words in self._words]
        self._pinned = [
            device.pinned(blocks.shape[1] * num_slots).view(num_slots, blocks.shape[1])
            for blocks in self._blocks
        ]
        self._saves, self._loads = device.queue(), device.queue()

    def mark(self) -> Point:
        """See `BlockCopier`."""
        return self._device.mark()

    def copy_out(self, blocks: Sequence[BlockIds]) -> Sequence[OutgoingBlock]:
        """See `BlockCopier`."""
        runs = self.slots.take(len(blocks))
        copies: list[_StagedBlock] = []
        try:
            for run in runs:
                end = self._copy_out(blocks[len(copies) :][: len(run)], slice(run.start, run.stop))
                copies += [_StagedBlock(self._pinned, end, self.slots, slot) for slot in run]
        except Exception:
            for run in runs:
                for slot in run:
                    self.slots.release(slot)
            raise
        return copies

    def _copy_out(self, blocks: Sequence[BlockIds], slots: slice) -> Point:
        """Copy blocks to slots in a row; return the point behind that."""
        end = self._device.mark()
        for group, _, _ in self._parts.of(blocks[0]):
            staged = self._staged[group][slots]
            self._device.gather(self._words[group], torch.tensor([ids[group] for ids in blocks]), staged)
            end = self._saves.copy(self._pinned[group][slots], staged.view(torch.uint8), self._device.mark())
        return end

    def buffer(self) -> ByteArray:
        """See `BlockCopier`."""
        buffer: ByteArray = self._device.pinned(self.bytes_per_block).numpy()
        return buffer

    def copy_in(self, block: BlockIds, content: ByteArray, after: Point) -> IncomingBlock:
        """See `BlockCopier`."""
        source, end = torch.from_numpy(content), after
        try:
            for group, block_id, part in self._parts.of(block):
                end = self._loads.copy(self._blocks[group][block_id], source[part], after)
        except Exception:
            if end is not after:  # nothing is to be written to a block whose load has failed
                with contextlib.suppress(Exception):
                    end.wait()
            raise
        return _ArrivingBlock(end, self._device)


class SlotRing:
    """Slots that are given out in turns, so that those taken together are next to each other.

    May be used by several threads.

    Args:
        num_slots: how many there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._is_free = np.ones(num_slots, dtype=np.bool_)
        self._next = 0
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return int(self._is_free.sum())

    def take(self, count: int) -> list[range]:
        """Return up to `count` slots as runs of neighbours; fewer if the next one is not free."""
        runs = []
        with self._lock:
            while count:
                behind = self._is_free[self._next : self._next + count]
                taken = len(behind) if behind.all() else int(behind.argmin())
                if not taken:
                    break
                runs.append(range(self._next, self._next + taken))
                behind[:taken] = False
                self._next = (self._next + taken) % len(self._is_free)
                count -= taken
        return runs

    def release(self, slot: int) -> None:
        """Let a slot be taken again."""
        with self._lock:
            self._is_free[slot] = True


class _StagedBlock:
    def __init__(self, pinned: Sequence[torch.Tensor], end: DevicePoint, slots: SlotRing, slot: int) -> None:
        self._pinned = pinned  # of each group
        self._end = end
        self._slots = slots
        self._slot = slot

    def content(self) -> ByteArray:
        self._end.wait()
        parts = [pinned[self._slot].numpy() for pinned in self._pinned]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def release(self) -> None:
        self._slots.release(self._slot)


class _ArrivingBlock(Generic[Point]):
    def __init__(self, end: Point, device: CopyDevice[Point]) -> None:
        self._end = end
        self._device = device

    def wait(self) -> None:
        self._end.wait()

    def hold_steps(self) -> None:
        try:
            self._device.hold(self._end)
        except Exception:  # then the host has to wait, or the copy has failed and writes nothing any more
            logger.exception("could not make the device wait for a KV block")
            with contextlib.suppress(Exception):
                self._end.wait()


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [N, bytes] as numbers of the widest type whose size divides that of a row."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[1] and rows.shape[1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows
