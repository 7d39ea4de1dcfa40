"""The weights of a model on disk, mapped into memory and read tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Protocol

import torch

from quire.errors import ConfigError, ModelError
from quire.kernels.layers.act_order import in_one_order
from quire.kernels.layers.weights import Weight, dequantize, part_of
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.weights import GGUFWeights
from quire.models.checkpoints.safetensors import SafetensorsWeights
from quire.models.config import ModelConfig
from quire.models.embedding import Embedding, EncodedEmbedding, EncodedRows, FloatEmbedding
from quire.models.weights import WeightSource, WeightSpec

_TIED_OUTPUT = "lm_head.weight"


class WeightStore(Protocol):
    """The files of one checkpoint. Weights have Hugging Face's names, in any file format."""

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""

    def names(self) -> Set[str]:
        """Return the names of all tensors in the files."""

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the tensors' names in the files that make up the weight `name`, present or not."""

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor in the files belongs to no weight and may be ignored."""

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight; raise `ModelError` if its shape is wrong or its format is not supported."""

    def encoded_embedding(self, name: str, shape: tuple[int, ...]) -> EncodedRows | None:
        """Return an embedding whose rows can be decoded one by one; None: use `read`.

        Raises `ModelError` as `read` does.
        """

    def is_packed_quickly(self, block_kinds: Set[str]) -> bool:
        """Return whether packing takes little longer than reading, for kernels that know `block_kinds`."""

    def release(self, name: str) -> None:
        """Release the pages that held a weight."""


class Checkpoint:
    """The weights of a model, open during the context; returned tensors stay valid afterwards.

    Args:
        path: directory of safetensors files with their config.json; or a GGUF file, or a directory with one.

    Raises:
        ModelError: the files are missing or cannot be read, or their format is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        gguf = find_gguf(path)
        self._store: WeightStore = SafetensorsWeights(path) if gguf is None else GGUFWeights(gguf)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def is_packed_quickly(self, block_kinds: Set[str]) -> bool:
        """See `WeightStore.is_packed_quickly`."""
        return self._store.is_packed_quickly(block_kinds)

    def check_names(self, specs: list[WeightSpec], config: ModelConfig) -> None:
        """Raise `ModelError` if a weight is missing or unexpected."""
        names = self._store.names()
        wanted = {
            stored
            for spec in specs
            for source in spec.sources
            for stored in self._store.stored_names(source.name)
        }
        missing = sorted(wanted - names)
        if missing:
            raise ModelError(f"{self._path} lacks {_listed(missing)}, which {config.architecture} needs")
        if config.tie_word_embeddings or config.pooling is not None:
            wanted.update(self._store.stored_names(_TIED_OUTPUT))
        others = (name for name in names - wanted if not name.startswith(config.ignored_prefixes))
        unexpected = sorted(name for name in others if not self._store.is_ignored(name))
        if unexpected:
            raise ModelError(
                f"{self._path} holds {_listed(unexpected)}, which {config.architecture} as described by "
                "its config does not have"
            )

    def matrix(self, sources: Sequence[WeightSource]) -> list[Weight]:
        """Return the stored parts of a matrix from `sources`, if their inputs are in the same order.

        Raises:
            ModelError, ConfigError: see `weight`.
        """
        return in_one_order([self.weight(source) for source in sources])

    def weight(self, source: WeightSource) -> Weight:
        """Return the part of a matrix in `source` as stored: quantized, or mapped from the file.

        Raises:
            ModelError: its shape is not that of `source`, or its dtype is not supported.
            ConfigError: a rank's part would cut groups of quantized weights.
        """
        weight = self._store.read(source.name, source.shape)
        if source.ranges is None:
            return weight
        try:
            return part_of(weight, source.axis, source.ranges)
        except ValueError as error:
            raise ConfigError(
                f"EngineConfig.tensor_parallel_size does not allow for {source.name} in {self._path}, a "
                f"quantized matrix: {error}; set it to 1, or use a checkpoint that is not quantized"
            ) from error

    def tensor(self, source: WeightSource) -> torch.Tensor:
        """Return a tensor in floating point: mapped from the file, or dequantized to float32.

        Raises:
            ModelError, ConfigError: see `weight`.
        """
        weight = self.weight(source)
        return weight if isinstance(weight, torch.Tensor) else dequantize(weight)

    def embedding(self, source: WeightSource, dtype: torch.dtype) -> Embedding:
        """Return an embedding of `dtype`, kept as stored if its rows can be decoded one by one.

        Raises:
            ModelError, ConfigError: see `weight`.
        """
        rows = self._store.encoded_embedding(source.name, source.shape)
        if rows is None:
            return FloatEmbedding(self.tensor(source).to(dtype))
        if source.ranges is not None:
            (held,) = source.ranges
            rows = EncodedRows(rows.octets[held.start : held.stop], rows.decode)
        return EncodedEmbedding(rows, dtype)

    def release(self, source: WeightSource) -> None:
        """Release the pages that held `source`; reading it again reloads them from the file."""
        self._store.release(source.name)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"{name:.100}" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
