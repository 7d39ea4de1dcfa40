"""What the GPU itself can do, measured: the rate of copies in its memory, and of products."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REPETITIONS = 20


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(compute: Callable[[], object], device: torch.device, repetitions: int = REPETITIONS) -> float:
    """Return the seconds that one of many computations takes, after three that do not count."""
    for _ in range(3):
        compute()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repetitions):
        compute()
    synchronize(device)
    return (time.perf_counter() - started) / repetitions


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second that a copy reads and writes together."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of two square matrices in bfloat16."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in "ab")
    return 2 * size**3 / seconds(lambda: left @ right, device)
