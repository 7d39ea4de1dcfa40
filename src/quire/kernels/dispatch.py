"""The kernels of this machine, chosen once: native ones where they are built, else the reference.

A `KernelSet` has one entry for each primitive that the model calls; native and reference versions have the
same signatures and are tested against each other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from quire.errors import ConfigError
from quire.kernels import has_native_kernels, reference, sampling
from quire.kernels.batch import AttentionBatch
from quire.kernels.kv_layer import KVLayer
from quire.kernels.linear import Linear, reference_linear
from quire.kernels.tiles import HeadLayout
from quire.kernels.weights import Weight

logger = logging.getLogger(__name__)


class KernelSet(Protocol):
    """The primitives. See `quire.kernels.reference` for what each computes."""

    name: str
    sampling: sampling.SamplingKernels

    def use_threads(self, num_threads: int) -> None:
        """Compute on so many threads from now on; 0: one for each physical core."""

    def linear(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        quantization: str = "none",
        group_size: int = 128,
        memory: Any = None,
    ) -> Linear:
        """Return a dense layer; see `quire.kernels.linear.reference_linear`."""

    def rms_norm(
        self, rows: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norm of each row."""

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add to the residual stream in place and return its norm."""

    def gated_activation(
        self, gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `activation(gate) * up`."""

    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        heads: HeadLayout,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, write keys and values; return the queries."""

    def paged_attention(
        self,
        query: torch.Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        key_scores: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of every token of the step."""


class ReferenceKernels:
    """Plain torch, and numpy for sampling."""

    name = "reference"
    sampling: sampling.SamplingKernels = sampling

    @staticmethod
    def use_threads(num_threads: int) -> None:
        """See `KernelSet`."""
        if num_threads:
            torch.set_num_threads(num_threads)

    @staticmethod
    def linear(parts: Sequence[Weight], bias: torch.Tensor | None = None, **options: Any) -> Linear:
        """See `KernelSet`."""
        options.pop("memory", None)  # torch allocates by itself
        return reference_linear(parts, bias, **options)

    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    gated_activation = staticmethod(reference.gated_activation)
    rotary_and_write_kv = staticmethod(reference.rotary_and_write_kv)
    paged_attention = staticmethod(reference.paged_attention)


@functools.cache
def kernel_set(name: str = "auto") -> KernelSet:
    """Return the kernels called `name`: auto, native or reference.

    Raises:
        ConfigError: native ones were asked for, and Quire was installed without them.
    """
    if name == "reference":
        return ReferenceKernels()
    if has_native_kernels():
        from quire.kernels.cpu.kernel_set import NativeKernels

        return NativeKernels()
    if name == "native":
        raise ConfigError(
            "EngineConfig.kernels is 'native', but Quire was installed without its native kernels; install a "
            "C++ compiler and then Quire again, or set it to 'auto'"
        )
    logger.warning(
        "Quire was installed without its native kernels and runs on the much slower reference ones; install "
        "a C++ compiler and then Quire again"
    )
    return ReferenceKernels()
