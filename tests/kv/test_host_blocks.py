"""The cache as single blocks of bytes: on the host, and in the memory of a device that is late."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from connector_contract import BLOCK, ArrayCache, ConnectorContract

from caches import make_cache
from faulty_connector import FaultyConnector
from late_device import DeviceError, LateDevice
from late_tensor import LateTensor
from quire.kv.connectors.host_blocks import BlockStore, DeviceBlocks, TensorBlocks, block_store


def device_blocks(memory: torch.Tensor, device: LateDevice) -> BlockStore:
    """Return a cache [num_blocks, ...] in a device's memory as single blocks."""
    blocks = block_store(SimpleNamespace(tensor=LateTensor(device, memory)))
    assert isinstance(blocks, DeviceBlocks)
    return blocks


class ConnectorOfDevice(FaultyConnector):
    def register_kv_caches(self, kv_caches: ArrayCache) -> None:
        super().register_kv_caches(device_blocks(torch.from_numpy(kv_caches.blocks), LateDevice()))


class TestSynchronousOnADevice(ConnectorContract):
    def make(self):
        return ConnectorOfDevice(BLOCK)

    def fail_next_load(self, connector):
        connector.fail_next_loads(1)


class TestAsynchronousOnADevice(TestSynchronousOnADevice):
    def make(self):
        return ConnectorOfDevice(BLOCK, load_steps=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_blocks_are_those_that_steps_asked_for_before_leave(dtype: torch.dtype) -> None:
    device = LateDevice()
    memory = make_cache(4, 2, 1, BLOCK, 8, dtype).tensor
    before = torch.randint(0, 256, (4, memory[0].nbytes), dtype=torch.uint8)
    memory.view(4, -1).view(torch.uint8).copy_(before)
    blocks = device_blocks(memory, device)
    device.steps.ask(lambda: memory[1].copy_(memory[0]))
    device.steps.ask(memory[3].zero_)
    content = np.empty(blocks.bytes_per_block, dtype=np.uint8)
    blocks.read_block(1, content)
    assert content.tobytes() == before[0].numpy().tobytes()
    device.steps.ask(memory[2].zero_)
    blocks.write_block(2, content)
    content[:] = 0  # which the caller may, as soon as the call has returned
    after = memory.view(4, -1).view(torch.uint8)
    assert [after[block].tolist() for block in (0, 1, 2)] == [before[0].tolist()] * 3
    assert not after[3].any()


def test_what_may_not_be_written_to_can_be_stored() -> None:
    memory = torch.zeros(2, 8, dtype=torch.uint8)
    device_blocks(memory, LateDevice()).write_block(1, np.frombuffer(b"constant", dtype=np.uint8))
    assert bytes(memory[1].tolist()) == b"constant"
    assert not memory[0].any()


def test_a_device_that_has_failed_is_told_of() -> None:
    device = LateDevice()
    blocks = device_blocks(torch.zeros(2, 8), device)
    content = np.full(blocks.bytes_per_block, 7, dtype=np.uint8)
    for copy in (blocks.read_block, blocks.write_block):
        device.failing = {"wait": 1}
        with pytest.raises(DeviceError):
            copy(1, content)
    assert (content == 7).all()


def test_blocks_of_the_host_are_its_memory() -> None:
    cache = make_cache(2, 2, 1, BLOCK, 8, torch.float32)
    blocks = block_store(cache)
    assert isinstance(blocks, TensorBlocks)
    blocks.write_block(1, np.ones(blocks.bytes_per_block, dtype=np.uint8))
    assert (cache.tensor[1].view(torch.uint8) == 1).all()
    assert block_store(blocks) is blocks
