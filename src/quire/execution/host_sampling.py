"""Sampling on the host: what it takes where logits are in the memory of another device.

Only rows that a device cannot choose for pass here, see `quire.execution.device_sampling`.
"""

from __future__ import annotations

import torch

from quire.kernels.devices import HOST
from quire.kernels.dispatch import kernel_set
from quire.kernels.interface import KernelSet
from quire.kernels.sampling import SamplingKernels


def host_kernels(kernels: KernelSet) -> SamplingKernels:
    """Return what scans logits on the host: of `kernels` if they compute there, else the best for it."""
    return (kernels if kernels.device == HOST else kernel_set()).sampling


class HostLogits:
    """Brings logits to the host."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] float32 in the host's memory: themselves if they are there, else a copy.

        The next call overwrites the copy.
        """
        if logits.device == HOST:
            return logits
        if self._pinned is None or len(self._pinned) < len(logits):
            self._pinned = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        return self._pinned[: len(logits)].copy_(logits)
