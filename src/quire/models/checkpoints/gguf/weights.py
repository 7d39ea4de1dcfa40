"""The weights of a GGUF file.

Each tensor becomes the form that the kernels can hold: Q2_K, Q3_K and types of 4 evenly spaced bits are int4
in groups of 16 or 32, and all other quantized types are 8 bits in such groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set
from pathlib import Path

import torch

from quire.errors import ModelError
from quire.kernels.layers.weights import Weight, with_tensors
from quire.models.checkpoints.gguf.architectures import architecture_of
from quire.models.checkpoints.gguf.blocks import KINDS, Kind
from quire.models.checkpoints.gguf.config import ROPE_TENSORS
from quire.models.checkpoints.gguf.file import TensorInfo, num_bytes, read_gguf
from quire.models.checkpoints.mapped_files import drop_pages
from quire.models.embedding import EncodedRows


class GGUFWeights:
    """See `quire.models.checkpoints.checkpoint.WeightStore`.

    Args:
        path: the file, or the first of several.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._architecture = architecture_of(self._file.metadata, path)

    def close(self) -> None:
        """See `WeightStore`. The mapping lives as long as its tensors."""

    def names(self) -> Set[str]:
        """See `WeightStore`."""
        return self._file.tensors.keys()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See `WeightStore`."""
        return (self._architecture.tensor(name)[0],)

    def is_ignored(self, name: str) -> bool:
        """See `WeightStore`: the rotary embedding's factors are read with the config."""
        return name in ROPE_TENSORS

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """See `WeightStore`."""
        stored, _ = self._architecture.tensor(name)
        kind, octets = self._blocks(name, shape)
        try:
            kind.check(octets)
        except ValueError as error:
            raise ModelError(f"{stored} in {self._file.path} cannot be read: {error}") from error
        weight = kind.decode(octets)
        if isinstance(weight, torch.Tensor):
            weight = weight.view(shape)
        return self._as_published(stored, weight)

    def encoded_embedding(self, name: str, shape: tuple[int, ...]) -> EncodedRows | None:
        """See `WeightStore`."""
        kind, octets = self._blocks(name, shape)
        return None if kind.block_size == 1 else EncodedRows(octets, kind.floats)

    def release(self, name: str) -> None:
        """See `WeightStore`."""
        drop_pages(self._bytes(self._info(name)))

    def _blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Kind, torch.Tensor]:
        """Return the kind of a weight, and its bytes [rows, blocks, block_bytes]."""
        info = self._info(name)
        wanted = (
            shape if len(shape) < 3 else (shape[0], *shape[2:])
        )  # of a convolution, each feature by itself
        if info.shape not in (shape, wanted):
            stored, _ = self._architecture.tensor(name)
            raise ModelError(
                f"{stored} in {self._file.path} has shape {list(info.shape)}; its metadata ask for "
                f"{list(shape)}"
            )
        kind = KINDS[info.kind]
        return kind, self._bytes(info).view(math.prod(shape[:-1]), -1, kind.block_bytes)

    def _info(self, name: str) -> TensorInfo:
        """Return the place of a weight: of a tensor, or of one expert's part of it."""
        stored, expert = self._architecture.tensor(name)
        info = self._file.tensors[stored]
        if expert is None:
            return info
        if len(info.shape) != 3 or expert >= info.shape[0]:
            raise ModelError(
                f"{stored} in {self._file.path} has shape {list(info.shape)}; its metadata ask for three "
                f"dimensions and more than {expert} experts"
            )
        part = dataclasses.replace(info, shape=info.shape[1:])
        return dataclasses.replace(part, start=info.start + expert * num_bytes(part))

    def _bytes(self, info: TensorInfo) -> torch.Tensor:
        return torch.frombuffer(info.data, dtype=torch.uint8, offset=info.start, count=num_bytes(info))

    def _as_published(self, name: str, weight: Weight) -> Weight:
        """Undo changes of llama.cpp's conversion in some architectures."""
        if self._architecture.norms_include_offset and name.endswith("norm.weight"):
            assert isinstance(weight, torch.Tensor)
            return weight.float() - 1.0
        if self._architecture.has_adjacent_pairs and name.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            return self._halves(weight)
        return weight

    def _halves(self, weight: Weight) -> Weight:
        """Reorder each head's rows so that rotated pairs are half a head apart, not adjacent."""
        metadata = self._file.metadata
        prefix = metadata["general.architecture"]
        head_dim = metadata.get(f"{prefix}.attention.key_length") or (
            metadata[f"{prefix}.embedding_length"] // metadata[f"{prefix}.attention.head_count"]
        )
        return with_tensors(weight, lambda rows: _deinterleave(rows, head_dim))


def _deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
