"""Stands for what torch tells of a GPU's memory: counts the tensors that there are, in the host's memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered; a `CudaMemory` meanwhile.

    Args:
        size: bytes of the device; a tensor beyond that raises `torch.OutOfMemoryError`.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.num_taken = 0
        self.taken_by_others = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    @property
    def num_available(self) -> int:
        return self.size - self.taken_by_others

    def begin_peak(self) -> None:
        self.peak = self.num_taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if self.num_taken + num_bytes > self.num_available:
            raise torch.OutOfMemoryError(f"no room for {num_bytes} bytes")
        self._known[key] = weakref.finalize(storage, self._gone, key, num_bytes)
        self._known[key].atexit = False
        self.num_taken += num_bytes
        self.peak = max(self.peak, self.num_taken)

    def _gone(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.num_taken -= num_bytes
