"""The weights of a GGUF file.

Each tensor becomes the form that the kernels can hold: 4 bits are int4 in groups of 32, and all other
quantized kinds are 8 bits in groups of 32 or 16.
"""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path

import torch

from quire.errors import ModelError
from quire.kernels.layers.weights import GroupedWeight, Weight
from quire.models.checkpoints.gguf.blocks import KINDS, Kind
from quire.models.checkpoints.gguf.config import ROPE_TENSORS
from quire.models.checkpoints.gguf.file import TensorInfo, read_gguf
from quire.models.checkpoints.gguf.names import gguf_name
from quire.models.checkpoints.mapped_files import drop_pages
from quire.models.embedding import EncodedRows


class GGUFWeights:
    """See `quire.models.checkpoints.checkpoint.WeightStore`.

    Args:
        path: the file, or the first of several.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._architecture: str = self._file.entry("general.architecture", str) or ""

    def close(self) -> None:
        """See `WeightStore`. The mapping lives as long as its tensors."""

    def names(self) -> Set[str]:
        """See `WeightStore`."""
        return self._file.tensors.keys()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See `WeightStore`."""
        return (gguf_name(name),)

    def is_ignored(self, name: str) -> bool:
        """See `WeightStore`: the rotary embedding's factors are read with the config."""
        return name in ROPE_TENSORS

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """See `WeightStore`."""
        kind, octets = self._blocks(name, shape)
        try:
            kind.check(octets)
        except ValueError as error:
            raise ModelError(f"{gguf_name(name)} in {self._file.path} cannot be read: {error}") from error
        weight = kind.decode(octets)
        if isinstance(weight, torch.Tensor):
            weight = weight.view(shape)
        return self._as_published(gguf_name(name), weight)

    def encoded_embedding(self, name: str, shape: tuple[int, ...]) -> EncodedRows | None:
        """See `WeightStore`."""
        kind, octets = self._blocks(name, shape)
        return None if kind.block_size == 1 else EncodedRows(octets, kind.decode)

    def release(self, name: str) -> None:
        """See `WeightStore`."""
        stored = gguf_name(name)
        info = self._file.tensors[stored]
        drop_pages(self._bytes(info, self._kind(stored, info)))

    def _blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Kind, torch.Tensor]:
        """Return the kind of a weight, and its bytes [rows, blocks, block_bytes]."""
        stored = gguf_name(name)
        info = self._file.tensors[stored]
        if info.shape != shape:
            raise ModelError(
                f"{stored} in {self._file.path} has shape {list(info.shape)}; its metadata ask for "
                f"{list(shape)}"
            )
        kind = self._kind(stored, info)
        return kind, self._bytes(info, kind).view(math.prod(shape[:-1]), -1, kind.block_bytes)

    def _kind(self, name: str, info: TensorInfo) -> Kind:
        kind = KINDS.get(info.kind)
        if kind is None:
            known = ", ".join(known.name for known in KINDS.values())
            raise ModelError(f"{name} in {self._file.path} is of ggml type {info.kind}; Quire reads {known}")
        if info.shape[-1] % kind.block_size:
            raise ModelError(
                f"{name} in {self._file.path} has rows of {info.shape[-1]} numbers; {kind.name} has blocks "
                f"of {kind.block_size}"
            )
        return kind

    def _bytes(self, info: TensorInfo, kind: Kind) -> torch.Tensor:
        num_bytes = math.prod(info.shape) // kind.block_size * kind.block_bytes
        return torch.frombuffer(info.data, dtype=torch.uint8, offset=info.start, count=num_bytes)

    def _as_published(self, name: str, weight: Weight) -> Weight:
        """Undo changes of llama.cpp's conversion in some architectures."""
        if self._architecture == "gemma" and name.endswith("norm.weight"):
            assert isinstance(weight, torch.Tensor)
            return weight.float() - 1.0  # the file's norm weights include the offset
        if self._architecture == "llama" and name.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            return self._halves(weight, "head_count" if "attn_q" in name else "head_count_kv")
        return weight

    def _halves(self, weight: Weight, count: str) -> Weight:
        """Reorder each head's rows so that rotated pairs are half a head apart, not adjacent."""
        metadata = self._file.metadata
        heads = metadata.get(f"llama.attention.{count}") or metadata["llama.attention.head_count"]
        if isinstance(weight, GroupedWeight):
            return GroupedWeight(
                _deinterleave(weight.values, heads),
                _deinterleave(weight.scales, heads),
                _deinterleave(weight.zeros, heads),
                weight.bits,
            )
        assert isinstance(weight, torch.Tensor)
        return _deinterleave(weight, heads)


def _deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
