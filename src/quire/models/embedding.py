"""The vectors of tokens: in floating point, or as a checkpoint stores them and decoded row by row."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from typing_extensions import override

from quire.kernels.devices.device import HOST
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.weights import Weight, dequantize

_ROWS_AT_ONCE = 256  # bounds what decoding takes beside its result


class Embedding(ABC):
    """A vector of `dtype` for each token id."""

    dtype: torch.dtype

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of token ids."""

    @abstractmethod
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [T, hidden] of token ids [T]."""

    @abstractmethod
    def on(self, device: torch.device, memory: WeightMemory) -> Embedding:
        """Return these vectors where `memory` brings them; on another device than the host, in floats."""


class FloatEmbedding(Embedding):
    """Vectors [vocab, hidden] in floating point."""

    def __init__(self, vectors: torch.Tensor) -> None:
        self.vectors = vectors
        self.dtype = vectors.dtype

    @override
    def __len__(self) -> int:
        return len(self.vectors)

    @override
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.vectors)

    @override
    def on(self, device: torch.device, memory: WeightMemory) -> FloatEmbedding:
        return FloatEmbedding(memory.bring(self.vectors, device))


@dataclasses.dataclass(slots=True, frozen=True)
class EncodedRows:
    """Rows of a matrix as they are stored, each of which can be decoded without the others."""

    octets: torch.Tensor  # [rows, ...] uint8
    decode: Callable[[torch.Tensor], Weight]  # takes some of the rows


class EncodedEmbedding(Embedding):
    """Vectors that stay encoded; where the file is mapped, they take no memory of their own."""

    def __init__(self, rows: EncodedRows, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rows = rows

    @override
    def __len__(self) -> int:
        return len(self._rows.octets)

    @override
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        chunks = (self._rows.octets[ids] for ids in torch.split(token_ids, _ROWS_AT_ONCE))
        return torch.cat([dequantize(self._rows.decode(chunk)).to(self.dtype) for chunk in chunks])

    @override
    def on(self, device: torch.device, memory: WeightMemory) -> Embedding:
        if device == HOST:
            return self
        return FloatEmbedding(memory.bring(self(torch.arange(len(self))), device))
