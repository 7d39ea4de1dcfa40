"""Host memory that other processes may map read-only."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref

import numpy as np
import torch

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.memory import HostMemory

logger = logging.getLogger(__name__)

MAX_SHARED_CACHES = 256  # per process, since each has a descriptor

_ALIGNMENT = 64  # bytes; that of torch's own memory
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; unknown to Python's fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


class SharedHostMemory(HostMemory):
    """Memory in an anonymous file, or ordinary memory where that is not possible.

    Attributes:
        descriptor: descriptor of the file, open for reading, closed with the memory; None: not shared.
        tensor_offsets: where each tensor begins in the file, in bytes.
    """

    def __init__(self, desc: CacheDesc) -> None:
        stride = -(-desc.tensor_bytes // _ALIGNMENT) * _ALIGNMENT
        self.tensor_offsets = [index * stride for index in range(desc.num_tensors)]
        opened = _new_file(self.tensor_offsets[-1] + desc.tensor_bytes)
        self.descriptor: int | None = None
        if opened is None:
            super().__init__(desc)
            return
        self.descriptor, shared = opened
        _sharing.add(self)
        weakref.finalize(self, os.close, self.descriptor)
        super().__init__(
            desc, [shared[offset : offset + desc.tensor_bytes] for offset in self.tensor_offsets]
        )


class MappedMemory:
    """Memory of another process, mapped for reading until this object is dropped.

    Args:
        descriptor: descriptor of its file; may be closed afterwards.

    Attributes:
        num_bytes: number of bytes of the file.
        address: where it is mapped.

    Raises:
        OSError: it cannot be mapped, or its owner could shrink it while it is read.
    """

    def __init__(self, descriptor: int) -> None:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise PermissionError("the peer's memory is not sealed against shrinking")
        self.num_bytes = os.fstat(descriptor).st_size
        try:
            mapped = mmap.mmap(descriptor, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (ValueError, OverflowError) as error:
            raise OSError(f"the peer's memory of {self.num_bytes} bytes cannot be mapped: {error}") from error
        self._bytes = np.frombuffer(mapped, dtype=np.uint8)  # keeps it mapped
        self.address: int = self._bytes.ctypes.data


_sharing: weakref.WeakSet[SharedHostMemory] = weakref.WeakSet()


def _new_file(num_bytes: int) -> tuple[int, torch.Tensor] | None:
    if len(_sharing) >= MAX_SHARED_CACHES:
        return None
    try:
        return _sealed_file(num_bytes)
    except OSError as error:
        logger.warning("a cache is not in shared memory: %s", error)
        return None


def _sealed_file(num_bytes: int) -> tuple[int, torch.Tensor]:
    """Return a descriptor to read from, and the file's bytes, which no other process can write."""
    writable = os.memfd_create("quire-datadist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor = -1
    try:
        os.ftruncate(writable, num_bytes)
        path = f"/proc/self/fd/{writable}"
        shared = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)  # existing mappings stay writable
    except BaseException:
        if descriptor != -1:
            os.close(descriptor)
        raise
    finally:
        os.close(writable)
    return descriptor, shared
