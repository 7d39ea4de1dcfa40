"""What tests of checkpoints share."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.devices.memory import WeightMemory


@pytest.fixture
def packed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the buffers that native kernels pack matrices into, one after the other."""
    packed: list[int] = []
    allocate = WeightMemory.allocate

    def noted(memory: WeightMemory, num_bytes: int) -> torch.Tensor:
        packed.append(num_bytes)
        return allocate(memory, num_bytes)

    monkeypatch.setattr(WeightMemory, "allocate", noted)
    return packed
