"""The native kernels as one set: C++, for the instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.cpu import attention, elementwise, sampling, threads
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.memory import WeightMemory
from quire.kernels.linear import Linear
from quire.kernels.sampling import SamplingKernels
from quire.kernels.weights import Weight


class NativeKernels:
    """See `quire.kernels.dispatch.KernelSet`."""

    name = "native"
    sampling: SamplingKernels = sampling

    @staticmethod
    def use_threads(num_threads: int) -> None:
        """Compute on so many threads; what is left to torch is small, and its own threads would compete."""
        threads.use_threads(num_threads)
        torch.set_num_threads(1)

    @staticmethod
    def linear(
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        memory: WeightMemory | None = None,
    ) -> Linear:
        """Return packed weights."""
        return PackedLinear(
            parts, bias, dtype=dtype, quantization=quantization, group_size=group_size, memory=memory
        )

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    gated_activation = staticmethod(elementwise.gated_activation)
    rotary_and_write_kv = staticmethod(elementwise.rotary_and_write_kv)
    paged_attention = staticmethod(attention.paged_attention)
