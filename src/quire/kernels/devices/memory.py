"""Memory in huge pages where the system has them, which saves TLB misses."""

from __future__ import annotations

import ctypes
import errno
import mmap

import torch

ALIGNMENT = 64  # bytes of a cache line
PAGE = 2 << 20  # bytes of a large page
SLAB = 64 << 20  # bytes asked of the system at once, unless a buffer is larger

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # of Linux 5.14; the mmap module does not name them


class WeightMemory:
    """Where weights go: for packed ones, buffers that live as long as any tensor over them does.

    Nothing is given back singly.
    """

    def __init__(self) -> None:
        self.is_filled = False  # whether buffers hold packed weights already
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8, aligned to a cache line and not initialized."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > len(self._slab):
            self._slab = map_large_pages(max(num_bytes, SLAB))
            start = 0
        self._used = start + num_bytes
        return self._slab[start : start + num_bytes]

    def bring(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor of the host on a device; what is there already stays as it is."""
        return tensor.to(device)


def map_large_pages(num_bytes: int) -> torch.Tensor:
    """Return at least `num_bytes` of fresh memory that begins with a large page."""
    size = -(-num_bytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    skipped = -whole.data_ptr() % PAGE
    return whole[skipped : skipped + size]


def map_file(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Return the first `num_bytes` of a file, shared with everyone who maps it; the descriptor may be closed.

    In large pages where the system has them for shared memory, too (`shmem_enabled` of Linux).
    """
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


def populate(address: int, num_bytes: int) -> bool:
    """Have the system provide the pages of memory now rather than when they are written; contents stay.

    Returns:
        False if the system cannot do that, or has no memory left for it.
    """
    return _advise(address, num_bytes, _MADV_POPULATE_WRITE) == 0


def read_ahead(address: int, num_bytes: int) -> None:
    """Have the system read the pages of a mapped file now rather than one by one; nothing if it cannot.

    Raises:
        OSError: the file cannot be read there; to access these pages would end the process.
    """
    if _advise(address, num_bytes, _MADV_POPULATE_READ) == errno.EFAULT:
        raise OSError(errno.EIO, "the file has become shorter, or its disk cannot be read")


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Tell the system about whole pages; return 0, or the number of the error."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock
    if not hasattr(libc, "madvise"):
        return errno.ENOSYS
    size = address + num_bytes - start
    status: int = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if status else 0
