"""A checkpoint with a cache of matrices packed by an earlier start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.kernels.devices.memory import ALIGNMENT, WeightMemory
from quire.kernels.layers.weights import GroupedWeight, Int8Weight, Weight, WeightInGroups, is_reordered
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.weight_cache import WeightCache
from quire.models.embedding import Embedding
from quire.models.weights import WeightSource


class CachedWeights:
    """A checkpoint, and the memory of its packed matrices (`memory.is_filled`: from the cache).

    A later start allocates the same buffers in the same order, and does not read the matrices.

    Args:
        checkpoint: where what is not packed comes from.
        cache: where packed weights are kept.
        key: key of this checkpoint and of how it is packed; see `cache_key`.
    """

    def __init__(self, checkpoint: Checkpoint, cache: WeightCache, key: str) -> None:
        self._checkpoint = checkpoint
        self._cache = cache
        self._key = key
        self._pending: dict[str, list[Any]] = {}  # forms of matrices that were read and not released yet
        self._forms: dict[str, list[Any]] = {}  # forms of matrices in buffers
        found = cache.read(key)
        if found is None:
            self.memory: WeightMemory = _RecordingMemory(self._pending, self._forms)
        else:
            self._forms, buffers = found
            self.memory = FilledMemory(buffers)

    def matrix(self, sources: Sequence[WeightSource]) -> list[Weight]:
        """Return a matrix, or, if it is already packed, its outline on torch's meta device."""
        if self.memory.is_filled and all(source.name in self._forms for source in sources):
            return [_outline(self._forms[source.name], source.held_shape) for source in sources]
        parts = self._checkpoint.matrix(sources)
        for source, part in zip(sources, parts, strict=True):
            self._pending[source.name] = _form(part)
        return parts

    def tensor(self, source: WeightSource) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._checkpoint.tensor(source)

    def embedding(self, source: WeightSource, dtype: torch.dtype) -> Embedding:
        """See `Checkpoint.embedding`."""
        return self._checkpoint.embedding(source, dtype)

    def release(self, source: WeightSource) -> None:
        """See `Checkpoint.release`."""
        self._pending.pop(source.name, None)
        self._checkpoint.release(source)

    def save(self) -> None:
        """Write the packed weights to the cache, after loading. Has no effect if they came from it."""
        if isinstance(self.memory, _RecordingMemory):
            self._cache.write(self._key, self._forms, self.memory.buffers)


class FilledMemory(WeightMemory):
    """Allocates from `buffers`, each [bytes] uint8, in order."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.is_filled = True
        self._buffers = iter(buffers)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return the next buffer.

        Raises:
            ValueError: its size differs; `PACKING_VERSION` was not raised with a change.
        """
        buffer = next(self._buffers, torch.empty(0))
        if len(buffer) != _whole_lines(num_bytes):
            raise ValueError(f"a cached buffer has {len(buffer)} bytes where {num_bytes} are needed")
        return buffer[:num_bytes]


class _RecordingMemory(WeightMemory):
    """Allocates buffers and remembers them, each for the pending matrices."""

    def __init__(self, pending: dict[str, list[Any]], forms: dict[str, list[Any]]) -> None:
        super().__init__()
        self.buffers: list[torch.Tensor] = []
        self._pending = pending
        self._forms = forms

    def allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = super().allocate(_whole_lines(num_bytes))
        self.buffers.append(buffer)
        self._forms.update(self._pending)
        return buffer[:num_bytes]


def _whole_lines(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole cache lines: the format has no holes between tensors."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _form(weight: Weight) -> list[Any]:
    if isinstance(weight, Int8Weight):
        return ["int8"]
    if isinstance(weight, WeightInGroups):
        return ["grouped", weight.bits, weight.group_size, is_reordered(weight), weight.is_mxfp4]
    return ["float"]


def _outline(form: list[Any], shape: tuple[int, ...]) -> Weight:
    rows, inputs = shape
    if form[0] == "float":
        return torch.empty(shape, device="meta")
    if form[0] == "int8":
        values = torch.empty(shape, dtype=torch.int8, device="meta")
        return Int8Weight(values, torch.empty(rows, device="meta"))
    values = torch.empty(shape, dtype=torch.uint8, device="meta")
    _, bits, group_size, has_order, is_mxfp4 = form
    scales = torch.empty(rows, inputs // group_size, device="meta")
    order = torch.empty(inputs, dtype=torch.int64, device="meta") if has_order else None
    return GroupedWeight(values, scales, scales, bits, order, is_mxfp4)
