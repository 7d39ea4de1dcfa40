"""Memory owned by the caller as the memory of a cache; it is not copied, zeroed or freed.

Tensors are kept as long as the cache. Memory given by address must stay valid until the cache is
unregistered; on the host, it is checked at the start.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import CacheMemory, DeviceMemory, HostMemory
from quire.datadist.enums import Placement
from quire.datadist.status import invalid

_MAPS = Path("/proc/self/maps")

Range = tuple[int, int]
"""First address and end."""


def memory_of_tensors(desc: CacheDesc, tensors: Sequence[torch.Tensor]) -> CacheMemory:
    """Return the memory of contiguous tensors on one device, and keep the tensors.

    Raises:
        LLMException: LLM_PARAM_INVALID: they are not as described.
    """
    if len(tensors) != desc.num_tensors:
        raise invalid(f"there are {len(tensors)} tensors for a cache of {desc.num_tensors}")
    for index, one in enumerate(tensors):
        if not one.is_contiguous() or one.nbytes != desc.tensor_bytes or one.device != tensors[0].device:
            raise invalid(
                f"tensor {index} has {one.nbytes} bytes on {one.device}; each must have {desc.tensor_bytes}, "
                f"contiguous, on {tensors[0].device}"
            )
    return _memory(desc, [one.detach().view(-1).view(torch.uint8) for one in tensors])


def memory_at(desc: CacheDesc, addresses: Sequence[int], device: torch.device) -> CacheMemory:
    """Return the memory at addresses, one per tensor, on the host or on `device`.

    Raises:
        LLMException: LLM_PARAM_INVALID: there is no such memory, or the tensors overlap.
    """
    is_on_host = desc.placement is Placement.HOST or device.type == "cpu"
    _require_apart(desc, addresses)
    if is_on_host:
        _require_writable([(one, one + desc.tensor_bytes) for one in addresses])
    view = _host_bytes if is_on_host else _device_bytes
    return _memory(desc, [view(one, desc.tensor_bytes, device) for one in addresses])


def _memory(desc: CacheDesc, tensor_bytes: list[torch.Tensor]) -> CacheMemory:
    device = tensor_bytes[0].device
    is_on_host = device.type == "cpu"
    return HostMemory(desc, tensor_bytes) if is_on_host else DeviceMemory(desc, device, tensor_bytes)


def _require_apart(desc: CacheDesc, addresses: Sequence[int]) -> None:
    if len(addresses) != desc.num_tensors:
        raise invalid(f"there are {len(addresses)} addresses for a cache of {desc.num_tensors} tensors")
    for one in addresses:
        if not 0 < one <= 2**64 - desc.tensor_bytes or one % desc.data_type.itemsize:
            raise invalid(
                f"{one:#x} is not the address of a tensor of {desc.tensor_bytes} bytes, or not aligned"
            )
    for one, following in itertools.pairwise(sorted(addresses)):
        if following - one < desc.tensor_bytes:
            raise invalid(f"the tensors of {desc.tensor_bytes} bytes at {one:#x} and {following:#x} overlap")


def _require_writable(ranges: list[Range]) -> None:
    mapped = _writable_ranges()
    for start, end in ranges:
        reached = start
        for first, last in mapped:
            if first <= reached < last:
                reached = last
        if reached < end:
            raise invalid(f"{reached:#x} is not in memory of this process that can be written to")


def _writable_ranges() -> list[Range]:
    """Return the readable and writable address ranges of this process."""
    ranges = []
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        bounds, rights, *_ = line.split(maxsplit=2)
        if rights.startswith("rw"):
            first, last = bounds.split("-")
            ranges.append((int(first, 16), int(last, 16)))
    return ranges


def _host_bytes(address: int, num_bytes: int, _device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def _device_bytes(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(_CudaArray(address, num_bytes), device=device)
    except RuntimeError as error:
        raise invalid(f"{address:#x} is not an address on {device}: {error}") from error
    if tensor.data_ptr() != address:
        raise invalid(f"{address:#x} is memory of another device than {device}")
    return tensor


class _CudaArray:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
