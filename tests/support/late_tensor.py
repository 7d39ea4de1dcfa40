"""A tensor in the memory of a `LateDevice`, with the few methods of torch's that blocks are copied by."""

from __future__ import annotations

from typing import Any

import torch

from late_device import LateDevice


class LateTensor:
    """Is read and written among the steps of its device.

    Args:
        device: does that when it gets there.
        memory: of the device.
    """

    is_cpu = False

    def __init__(self, device: LateDevice, memory: torch.Tensor) -> None:
        self.device = device
        self.memory = memory
        self.shape, self.dtype = memory.shape, memory.dtype

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, index: int) -> LateTensor:
        return LateTensor(self.device, self.memory[index])

    def view(self, *how: Any) -> LateTensor:
        return LateTensor(self.device, self.memory.view(*how))

    def byte(self) -> LateTensor:
        return LateTensor(self.device, self.memory.byte())

    def new_empty(self, size: int, *, device: str = "") -> LateTensor | torch.Tensor:
        empty = self.memory.new_empty(size)
        return empty if device == "cpu" else LateTensor(self.device, empty)

    def cpu(self) -> torch.Tensor:
        result = torch.empty_like(self.memory)
        self._ask(result, self.memory)
        return result

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self._ask(self.memory, source, waits=not non_blocking)

    def _ask(self, target: torch.Tensor, source: torch.Tensor, *, waits: bool = True) -> None:
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        self.device.steps.ask(lambda: target.copy_(source))
        if waits:
            self.device.mark().wait()
