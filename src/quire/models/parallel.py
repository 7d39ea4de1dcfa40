"""Layers that several ranks compute together, each with its shard of the weights.

Method: Shoeybi et al. 2019, Megatron-LM. A layer divided by outputs feeds one divided by inputs; only the
latter's results are summed over the ranks. Every sum is in the order of the ranks, so that all of them have
the same bits, and a row's bits do not depend on the other rows (batch-invariant).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from typing_extensions import override

from quire.kernels.layers.experts import Experts
from quire.kernels.layers.linear import Linear
from quire.models.embedding import Embedding
from quire.models.shard import Shard


class Communicator(ABC):
    """Exchanges tensors among the ranks, which all make the same calls in the same order.

    A tensor has the same shape and type on all ranks. On the host, a call raises `ExchangeError` if a rank
    does not take part. On a device, nothing waits for an exchange: it is done in order with the device's
    other work.
    """

    @abstractmethod
    def all_gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return every rank's `part`, in their order; to be used up before the next call."""

    @abstractmethod
    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return every rank's `part` on rank 0, and nothing elsewhere."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with rank 0's."""

    @abstractmethod
    def note_replay(self) -> None:
        """Note that captured exchanges are replayed on the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place in its tensor-parallel group."""

    shard: Shard
    communicator: Communicator

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `part`, added in their order."""
        first, *others = self.communicator.all_gather(part)
        total = first.clone()
        for other in others:
            total += other
        return total

    def embed(self, token_ids: torch.Tensor, embedding: Embedding, vocab_size: int) -> torch.Tensor:
        """Return the vectors [T, hidden] of `token_ids` [T]; each rank's `embedding` has some of them."""
        local = token_ids - self.shard.share(vocab_size).start
        is_elsewhere = (local < 0) | (local >= len(embedding))
        part = embedding(local.masked_fill(is_elsewhere, 0))
        return self.sum(part.masked_fill_(is_elsewhere[:, None], 0))


class RowParallelLinear(Linear):
    """A layer of which each rank has some inputs: the ranks' results are summed, in float32.

    Args:
        local: this rank's inputs of the matrix; rank 0's has the bias.
        parallel: the ranks.
    """

    def __init__(self, local: Linear, parallel: TensorParallel) -> None:
        self.in_features, self.out_features, self.bias = local.in_features, local.out_features, local.bias
        self._local = local
        self._parallel = parallel

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self._local.kind

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        part = rows.new_empty(len(rows), self.out_features, dtype=torch.float32)
        total = self._parallel.sum(self._local(rows, out=part))
        return total.to(rows.dtype) if out is None else out.copy_(total)


class RowParallelExperts(Experts):
    """Experts of which each rank has some inner features: the ranks' results are summed, in float32.

    Args:
        local: this rank's features of every expert.
        parallel: the ranks.
    """

    def __init__(self, local: Experts, parallel: TensorParallel) -> None:
        self._local = local
        self._parallel = parallel

    @override
    def __call__(
        self, rows: torch.Tensor, scores: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        part = rows.new_empty(rows.shape, dtype=torch.float32)
        total = self._parallel.sum(self._local(rows, scores, out=part))
        return total.to(rows.dtype) if out is None else out.copy_(total)


class VocabularyParallelLinear(Linear):
    """The output layer, of which each rank has some tokens. Only rank 0 gets all of them, others their own.

    Args:
        local: this rank's tokens.
        parallel: the ranks.
        vocab_size: of the whole layer.
    """

    def __init__(self, local: Linear, parallel: TensorParallel, vocab_size: int) -> None:
        self.in_features, self.out_features, self.bias = local.in_features, vocab_size, None
        self._local = local
        self._communicator = parallel.communicator
        size = parallel.shard.size
        self._shares = [Shard(rank, size).share(vocab_size) for rank in range(size)]
        self._width = max(map(len, self._shares))

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        padded = rows.new_empty(len(rows), self._width, dtype=torch.float32)
        own = self._local(rows, out=padded[:, : self._local.out_features])
        parts = self._communicator.gather(padded)
        if not parts:
            return own
        if out is None:
            out = rows.new_empty(len(rows), self.out_features)
        for share, part in zip(self._shares, parts, strict=True):
            out[:, share.start : share.stop] = part[:, : len(share)]
        return out


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows of floats [rows, N], [rows]; halves are added until one column is left.

    torch's own sum on a GPU has another order for other numbers of rows.
    """
    width = values.shape[1]
    if not width:
        return values.new_zeros(len(values))
    while width > 1:
        half = width // 2
        rest = values[:, 2 * half : width]
        values = values[:, :half] + values[:, half : 2 * half]
        values[:, : rest.shape[1]] += rest
        width = half
    return values[:, 0]


class FullWidthNormLinear(Linear):
    """Queries, keys and values of a rank's heads, with norms over the queries and the keys of all ranks.

    Args:
        local: makes this rank's queries, keys and values.
        norms: float32 weights for this rank's queries and keys.
        parallel: the ranks.
        heads: query heads and KV heads of all ranks.
        head_dim: features of a head.
        eps: added to the mean square.
    """

    def __init__(
        self,
        local: Linear,
        norms: tuple[torch.Tensor, torch.Tensor],
        parallel: TensorParallel,
        *,
        heads: tuple[int, int],
        head_dim: int,
        eps: float,
    ) -> None:
        self.in_features, self.out_features, self.bias = local.in_features, local.out_features, local.bias
        self._local = local
        self._norms = norms
        self._parallel = parallel
        self._head_dim = head_dim
        sizes = torch.tensor(heads) * head_dim
        counted = torch.tensor(parallel.shard.counted_kv_heads(*heads), dtype=torch.int64)
        self._sizes, self._counted_kv_heads = (each.to(norms[0].device) for each in (sizes, counted))
        self._eps = eps

    @property
    @override
    def kind(self) -> Hashable:
        return super().kind, self._local.kind

    @override
    def __call__(self, rows: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self._local(rows, out=out)
        q_size, k_size = map(len, self._norms)
        query, key = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        counted = key.view(len(key), -1, self._head_dim).index_select(1, self._counted_kv_heads).flatten(1)
        squares = torch.stack([row_sums(part.float().square()) for part in (query, counted)], dim=1)
        inverse = (self._parallel.sum(squares) / self._sizes + self._eps).rsqrt()
        for index, (states, norm) in enumerate(zip((query, key), self._norms, strict=True)):
            states.copy_(states.float() * inverse[:, index, None] * norm)
        return qkv


class DividedNorm:
    """An RMS norm of each group of features, of which ranks have parts; it takes the place of the rows.

    Args:
        weight: [features] float32, of this rank's features.
        groups: those that runs of equally many of these are of, in order.
        parallel: the ranks.
        num_groups: of all ranks.
        size: features of a group.
        eps: added to the mean square.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        groups: Sequence[int],
        parallel: TensorParallel,
        *,
        num_groups: int,
        size: int,
        eps: float,
    ) -> None:
        self._weights = weight.chunk(len(groups))
        self._groups = groups
        self._parallel = parallel
        self._num_groups = num_groups
        self._size = size
        self._eps = eps

    def __call__(self, rows: torch.Tensor) -> None:
        """Normalize rows [T, features]."""
        runs = list(zip(rows.chunk(len(self._groups), dim=1), self._weights, self._groups, strict=True))
        squares = rows.new_zeros(len(rows), self._num_groups, dtype=torch.float32)
        for part, _, group in runs:
            squares[:, group] += row_sums(part.float().square())
        inverse = (self._parallel.sum(squares) / self._size + self._eps).rsqrt()
        for part, weight, group in runs:
            part.copy_(part.float() * inverse[:, group, None] * weight)
