"""Random tensors where Triton's kernels run, and how close to others their results must be."""

from __future__ import annotations

import torch

from quire.kernels.triton.device import kernel_device

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
