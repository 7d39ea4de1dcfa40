"""Weights on their way to a device: every byte arrives, whatever order the device and the threads go in."""

from __future__ import annotations

import contextlib
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from late_device import DeviceError, LateDevice
from quire.errors import ModelError
from quire.kernels.devices import staging
from quire.kernels.devices.device import HOST
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.devices.staging import MIN_STAGED_BYTES, StagedMemory
from quire.kernels.layers.weights import Float8Weight, GroupedWeight, Int8Weight, with_tensors
from quire.kernels.triton.linear import dense as triton_linear
from quire.models.checkpoints import loading
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder

BUFFER = 40_000  # bytes, no divisor of anything


def memory_over(device: LateDevice, num_threads: int = 3) -> StagedMemory:
    return StagedMemory(HOST, device, num_threads=num_threads, buffer_bytes=BUFFER)


def random(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes).astype(np.uint8))


def in_steps(device: LateDevice, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Have a step read a tensor; what it has seen is in the list once the step is done."""
    seen: list[torch.Tensor] = []
    device.steps.ask(lambda: seen.append(tensor.clone()))
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_steps_see_all_of_a_weight(seed: int) -> None:
    """Buffers are filled again only when their copies have been made, in any order of the device."""
    rng = np.random.default_rng(seed)
    device = LateDevice()
    memory = memory_over(device)
    assert device.num_pinned_bytes == 2 * 3 * BUFFER
    sizes = [MIN_STAGED_BYTES, MIN_STAGED_BYTES + 1, 11 * BUFFER, 300_001]
    weights = [random(size, number) for number, size in enumerate(sizes)]
    found = [in_steps(device, memory.bring(weight, HOST)) for weight in weights]
    while device.run(lambda ready: ready[rng.integers(len(ready))]):
        pass
    memory.close()
    for weight, (seen,) in zip(weights, found, strict=True):
        assert torch.equal(seen, weight)


def test_the_memory_of_a_weight_may_still_be_in_use() -> None:
    device = LateDevice()
    memory = memory_over(device)
    free = device.steps.operations
    device.steps.ask(lambda: None)
    brought = memory.bring(random(MIN_STAGED_BYTES), HOST)
    brought.fill_(7)  # stands for what had the memory before
    copies = device.queues[1]
    assert not copies.can_run
    assert len(free) > 1
    device.finish()
    memory.close()
    assert torch.equal(brought, random(MIN_STAGED_BYTES))


def test_threads_share_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MIN_PIECE_BYTES", 1000)
    threads: set[int] = set()
    together = threading.Barrier(3, timeout=60)

    class Device(LateDevice):
        def __init__(self) -> None:
            super().__init__(is_eager=True)
            queue = self.queue()
            copy = queue.copy
            self.queue = lambda: queue  # type: ignore[method-assign]

            def watched(*args: Any) -> Any:
                threads.add(threading.get_ident())
                together.wait()
                return copy(*args)

            queue.copy = watched  # type: ignore[method-assign]

    memory = memory_over(Device())
    memory.bring(random(3 * (MIN_STAGED_BYTES // 3 + 1)), HOST)
    assert len(threads) == 3


def test_tensors_keep_their_types_shapes_and_order() -> None:
    device = LateDevice()
    memory = memory_over(device)
    matrix = torch.randn(130, 260).bfloat16()
    for weight in (matrix, matrix.t(), matrix[:, 1:].float(), random(MIN_STAGED_BYTES - 1), matrix[:0]):
        brought = memory.bring(weight, HOST)
        device.finish()
        assert (brought.dtype, brought.shape) == (weight.dtype, weight.shape)
        assert torch.equal(brought, weight)
    memory.close()


def test_all_tensors_of_a_weight_are_brought() -> None:
    values, tables = torch.ones(4, 32, dtype=torch.uint8), torch.ones(4, 2)
    weights = [
        torch.ones(3, 3),
        Int8Weight(values.to(torch.int8), tables[:, 0]),
        Float8Weight(values.to(torch.float8_e4m3fn), tables[:, :1], (1, 32)),
        GroupedWeight(values, tables, tables, 4, torch.arange(32)),
    ]
    counts = []
    for weight in weights:
        brought: list[torch.Tensor] = []
        same = with_tensors(weight, lambda tensor, brought=brought: (brought.append(tensor), tensor)[1])
        assert type(same) is type(weight)
        counts.append(len(brought))
    assert counts == [1, 2, 2, 4]


def test_a_file_that_has_become_shorter_is_an_error_and_no_end_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(300_000))
    with file.open("r+b") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        opened.truncate(100_000)
    device = LateDevice()
    memory = memory_over(device)
    with pytest.raises(OSError, match="has become shorter, or its disk cannot be read"):
        memory.bring(torch.frombuffer(mapping, dtype=torch.uint8), HOST)
    whole = random(200_000)  # the buffers are there for the next one
    brought = memory.bring(whole, HOST)
    device.finish()
    memory.close()
    assert torch.equal(brought, whole)


def test_a_device_that_takes_no_copies_ends_the_load() -> None:
    device = LateDevice()
    memory = memory_over(device)
    device.failing["copy"] = 1
    with pytest.raises(DeviceError, match="copy fails"):
        memory.bring(random(6 * BUFFER), HOST)
    device.finish()
    memory.close()


def test_copies_that_are_not_made_end_the_load() -> None:
    device = LateDevice()
    memory = memory_over(device)
    memory.bring(random(6 * BUFFER), HOST)
    device.failing["wait"] = 1
    with pytest.raises(DeviceError, match="wait fails"):
        memory.close()


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_a_model_is_loaded_in_pieces(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels in the interpreter, and threads beside them: the weights that come without."""
    path = make_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16", num_hidden_layers=1)
    config = read_model_config(path)
    options = WeightOptions(kernels="triton", quantization=quantization, group_size=32)
    expected = load_decoder(path, config, options=options)
    device = LateDevice(is_eager=True)
    monkeypatch.setattr(staging, "MIN_STAGED_BYTES", 1000)
    monkeypatch.setattr(staging, "MIN_PIECE_BYTES", 1000)
    monkeypatch.setattr(device, "hold", device.reach)
    memory = memory_over(device)
    monkeypatch.setattr(loading, "weight_memory", lambda _: contextlib.closing(memory))
    found = load_decoder(path, config, options=options)
    assert device.num_done > 100
    for name in ("qkv", "output"):
        layers = (getattr(model.layers[0][0], name) for model in (found, expected))
        for table, other in zip(*(layer.tables for layer in layers), strict=True):
            assert torch.equal(table.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(found.embedding.vectors, expected.embedding.vectors)
    experts = (model.layers[0][1].experts._gate_up._tables for model in (found, expected))
    for table, other in zip(*experts, strict=True):
        assert torch.equal(table.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_few_rows_are_quantized_at_once(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": quantization, "group_size": 32}
    parts = [torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (70, 9)]
    expected = triton_linear.linear(parts, **options)
    monkeypatch.setattr(triton_linear, "_MAX_QUANTIZED", 1000)
    quantized: list[int] = []
    for name in ("quantize_int8", "quantize_int4"):
        whole = getattr(triton_linear, name)
        monkeypatch.setattr(
            triton_linear,
            name,
            lambda rows, *sizes, whole=whole: (quantized.append(len(rows)), whole(rows, *sizes))[1],
        )
    found = triton_linear.linear(parts, **options)
    assert quantized == [15, 15, 15, 15, 10, 9]
    assert (found.in_features, found.out_features) == (64, 79)
    for table, other in zip(found.tables, expected.tables, strict=True):
        assert torch.equal(table, other)


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise OSError(5, "its disk cannot be read")

    path = make_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(WeightMemory, "bring", fail)
    with pytest.raises(ModelError, match=rf"the weights in {path} cannot be read: .*its disk"):
        load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
