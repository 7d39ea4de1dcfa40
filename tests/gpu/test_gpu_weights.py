"""Weights on their way to a GPU, through pinned buffers that several threads fill."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from late_device import LateDevice
from quire.kernels.devices.device import HOST
from quire.kernels.devices.staging import StagedMemory, weight_memory
from quire.kernels.triton.device import is_interpreted, kernel_device

ROWS = 300 if is_interpreted else 40_000


def test_weights_arrive_as_they_are_in_the_file(tmp_path: Path) -> None:
    weights = {str(number): torch.randn(ROWS + number, 1000).bfloat16() for number in range(4)}
    save_file(weights, tmp_path / "weights")
    device = kernel_device()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(safe_open(tmp_path / "weights", framework="pt"))
        if is_interpreted:
            late = LateDevice(is_eager=True)
            memory = StagedMemory(HOST, late, num_threads=2, buffer_bytes=10_000)
            stack.enter_context(contextlib.closing(memory))
        else:
            memory = stack.enter_context(weight_memory(device))
        brought = {name: memory.bring(file.get_tensor(name), device) for name in weights}
        sums = {
            name: weight.float().sum(dim=0) for name, weight in brought.items()
        }  # a step behind the copies
        if is_interpreted:
            late.finish()
    for name, weight in weights.items():
        assert torch.equal(brought[name].cpu(), weight)
        if not is_interpreted:
            assert torch.equal(sums[name], brought[name].float().sum(dim=0))
