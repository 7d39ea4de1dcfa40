"""Random tensors where Triton's kernels run, and how close to others their results must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.kernels.attention.kv_quantizers import PageQuantizer
from quire.kernels.triton.device import kernel_device
from quire.kv import PagedAttentionCache

DEVICE = kernel_device()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What one rounding to the type and a few in float32 may make of a number, relative to it.
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
POISON = float("nan")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


def strided(rows: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with NaN between the rows."""
    wider = poisoned(rows.shape[0], rows.shape[1] + 13, dtype=rows.dtype)
    return wider[:, 5 : 5 + rows.shape[1]].copy_(rows)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, roundings: int = 1) -> None:
    assert actual.dtype == expected.dtype
    tolerance = roundings * RELATIVE[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=tolerance, atol=2e-6 * roundings)


@dataclasses.dataclass
class Layer:
    """A layer's part of a cache where the kernels run, filled with poison."""

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    quantizer: PageQuantizer | None
    handles: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def poisoned(cls, cache: PagedAttentionCache, layer: int, device: torch.device = DEVICE) -> Layer:
        """Return a copy of a layer of `cache`, with the same strides."""
        memory = cache.tensor.to(device, copy=True)
        view = cache.views[layer]

        def copy(part: torch.Tensor | None) -> torch.Tensor | None:
            if part is None:
                return None
            start = (part.data_ptr() - cache.tensor.data_ptr()) // part.element_size()
            copied = memory.view(part.dtype).flatten().as_strided(part.shape, part.stride(), start)
            return copied.fill_(99 if part.dtype == torch.int8 else POISON)

        parts = (view.key_pages, view.value_pages, view.key_scales, view.value_scales)
        return cls(*map(copy, parts), view.quantizer)  # type: ignore[arg-type]

    def cpu(self) -> Layer:
        """Return the same on the CPU."""
        return Layer(
            self.key_pages.cpu(),
            self.value_pages.cpu(),
            None if self.key_scales is None else self.key_scales.cpu(),
            None if self.value_scales is None else self.value_scales.cpu(),
            self.quantizer,
        )

    @property
    def parts(self) -> list[torch.Tensor]:
        all_parts = (self.key_pages, self.value_pages, self.key_scales, self.value_scales)
        return [part for part in all_parts if part is not None]
