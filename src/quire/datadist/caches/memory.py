"""The memory of caches, on the host or a device."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import psutil
import torch
from typing_extensions import override

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.spans import Window
from quire.datadist.caches.tensor import torch_dtype
from quire.datadist.enums import Placement
from quire.datadist.status import LLMException, LLMStatusCode, failure

Forget: TypeAlias = Callable[["CacheMemory", float], None]
"""Makes a library release memory before a deadline; raises `OSError`."""


class CacheMemory(ABC):
    """The tensors of one cache.

    Attributes:
        tensors: the tensors as described, without shared memory.
        tensor_bytes: the same memory as flat bytes.
        is_lost: whether a transfer that could not be cancelled may still write to it.
    """

    def __init__(self, desc: CacheDesc, tensor_bytes: list[torch.Tensor]) -> None:
        self.is_lost = False
        dtype = torch_dtype(desc.data_type)
        self.tensor_bytes = tensor_bytes
        self.tensors = [one.view(dtype).view(desc.shape) for one in tensor_bytes]
        self._users: list[weakref.WeakMethod[Forget]] = []

    def add_user(self, forget: Forget) -> None:
        """Register a method that makes a library release this memory; holds its owner weakly."""
        self._users.append(weakref.WeakMethod(forget))

    def be_forgotten(self, deadline: float) -> None:
        """Make all libraries release this memory, before its owner takes it back.

        Raises:
            OSError: one did not in time.
        """
        for user in self._users:
            forget = user()
            if forget is not None:
                forget(self, deadline)

    def addresses(self) -> list[int]:
        """Return the address of each tensor."""
        return [one.data_ptr() for one in self.tensors]

    def copy_from(self, source: CacheMemory, to_offset: int, from_offset: int, num_bytes: int) -> None:
        """Copy a span of bytes of each tensor."""
        for mine, theirs in zip(self.tensor_bytes, source.tensor_bytes, strict=True):
            mine[to_offset : to_offset + num_bytes].copy_(theirs[from_offset : from_offset + num_bytes])

    def copy_blocks_from(
        self, source: CacheMemory, block_bytes: int, from_blocks: Sequence[int], to_blocks: Sequence[int]
    ) -> None:
        """Copy blocks of each tensor, also of this memory itself; all are read before any is written."""
        for mine, theirs in zip(self.tensor_bytes, source.tensor_bytes, strict=True):
            read = theirs.view(-1, block_bytes)[
                torch.tensor(from_blocks, dtype=torch.int64, device=theirs.device)
            ]
            targets = torch.tensor(to_blocks, dtype=torch.int64, device=mine.device)
            mine.view(-1, block_bytes)[targets] = read.to(mine.device)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device has been done."""

    @abstractmethod
    def outgoing(self, window: Window) -> list[memoryview]:
        """Return the contents of a window, in order, as memory to send from."""

    @abstractmethod
    def incoming(self, window: Window) -> list[memoryview]:
        """Return memory to receive a window into; call `arrived` afterwards."""

    @abstractmethod
    def arrived(self, window: Window, views: list[memoryview]) -> None:
        """Take over data received into the memory from `incoming`."""

    @abstractmethod
    def copy_in(
        self, tensor: int, offsets: list[int], source_addresses: list[int], lengths: list[int]
    ) -> None:
        """Copy parts of host memory into a tensor, at offsets in bytes, unchecked."""


class HostMemory(CacheMemory):
    """Host memory: sent from and received into without a copy.

    Args:
        desc: description of the cache.
        tensor_bytes: existing memory for each tensor; None: new memory, zero-filled.
    """

    def __init__(self, desc: CacheDesc, tensor_bytes: list[torch.Tensor] | None = None) -> None:
        super().__init__(
            desc, zero_bytes(desc, torch.device("cpu")) if tensor_bytes is None else tensor_bytes
        )
        self._views = [one.numpy().data for one in self.tensor_bytes]

    @override
    def synchronize(self) -> None:
        pass

    @override
    def outgoing(self, window: Window) -> list[memoryview]:
        views = self._views
        return [views[tensor][offset : offset + length] for tensor, offset, length in window]

    @override
    def incoming(self, window: Window) -> list[memoryview]:
        return self.outgoing(window)

    @override
    def arrived(self, window: Window, views: list[memoryview]) -> None:
        pass

    @override
    def copy_in(
        self, tensor: int, offsets: list[int], source_addresses: list[int], lengths: list[int]
    ) -> None:
        base = self.tensor_bytes[tensor].data_ptr()
        targets = [base + offset for offset in offsets]
        collections.deque(map(ctypes.memmove, targets, source_addresses, lengths), maxlen=0)


class DeviceMemory(CacheMemory):
    """Device memory: windows are staged in host memory.

    Args:
        desc: description of the cache.
        device: the device.
        tensor_bytes: as for `HostMemory`.
        stream: the device's stream for all copies, whose order with other work is up to the owner. None:
            copies follow all work queued before.
    """

    def __init__(
        self,
        desc: CacheDesc,
        device: torch.device,
        tensor_bytes: list[torch.Tensor] | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(desc, zero_bytes(desc, device) if tensor_bytes is None else tensor_bytes)
        self._device = device
        self._stream = stream

    @override
    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @override
    def outgoing(self, window: Window) -> list[memoryview]:
        staged = self._staging(window)
        with self._copying():
            for part, on_host in self._parts(window, staged):
                on_host.copy_(part, non_blocking=True)
        return [staged.numpy().data]

    @override
    def incoming(self, window: Window) -> list[memoryview]:
        return [self._staging(window).numpy().data]

    @override
    def arrived(self, window: Window, views: list[memoryview]) -> None:
        with self._copying():
            for part, on_host in self._parts(window, torch.frombuffer(views[0], dtype=torch.uint8)):
                part.copy_(on_host, non_blocking=True)

    @override
    def copy_in(
        self, tensor: int, offsets: list[int], source_addresses: list[int], lengths: list[int]
    ) -> None:
        with self._copying():
            for offset, address, length in zip(offsets, source_addresses, lengths, strict=True):
                part = (ctypes.c_uint8 * length).from_address(address)
                source = torch.frombuffer(part, dtype=torch.uint8)
                self.tensor_bytes[tensor][offset : offset + length].copy_(source)

    def _staging(self, window: Window) -> torch.Tensor:
        """Return host memory for a window."""
        num_bytes = sum(length for _, _, length in window)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _parts(self, window: Window, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a window on the device, and on the host."""
        start = 0
        for tensor, offset, length in window:
            yield self.tensor_bytes[tensor][offset : offset + length], staged[start : start + length]
            start += length

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Run copies in the stream, if any, and wait for them."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()


class MemoryAllocator:
    """Allocates caches on the host and on one device.

    Args:
        device: what `Placement.DEVICE` means.
        host_memory: returns memory of the host.
    """

    def __init__(
        self, device: torch.device, host_memory: Callable[[CacheDesc], HostMemory] = HostMemory
    ) -> None:
        self._device = device
        self._host_memory = host_memory

    def allocate(self, desc: CacheDesc) -> CacheMemory:
        """Return zero-filled memory.

        Raises:
            LLMException: LLM_DEVICE_OUT_OF_MEMORY.
        """
        num_bytes = desc.num_tensors * desc.tensor_bytes
        is_on_host = desc.placement is Placement.HOST or self._device.type == "cpu"
        if is_on_host and num_bytes > psutil.virtual_memory().available:
            raise _out_of_memory(num_bytes, "host")
        try:
            return self._host_memory(desc) if is_on_host else DeviceMemory(desc, self._device)
        except (MemoryError, RuntimeError) as error:  # torch's allocation errors are RuntimeErrors
            raise _out_of_memory(num_bytes, str(self._device)) from error


def zero_bytes(desc: CacheDesc, device: torch.device | None = None) -> list[torch.Tensor]:
    """Return zeros for each tensor of a cache, on the host or on `device`."""
    size = desc.tensor_bytes
    return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(desc.num_tensors)]


def _out_of_memory(num_bytes: int, where: str) -> LLMException:
    return failure(
        LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
        f"a cache of {num_bytes} bytes does not fit into the memory of {where}; release caches and keys",
    )
