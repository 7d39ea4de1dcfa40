"""Random ragged attention over a shuffled, poisoned paged cache, beside a plain float64 attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.reference import paged_attention, write_kv


@dataclasses.dataclass
class Sequences:
    """Queries, keys and values of whole sequences: lists of [length, heads, head_dim]."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]

    @classmethod
    def random(
        cls, lengths: list[int], heads: int, kv_heads: int, head_dim: int, *, seed: int = 0
    ) -> Sequences:
        generator = torch.Generator().manual_seed(seed)

        def states(count: int) -> list[torch.Tensor]:
            return [torch.randn(length, count, head_dim, generator=generator) for length in lengths]

        return cls(states(heads), states(kv_heads), states(kv_heads))

    @property
    def lengths(self) -> list[int]:
        return [len(query) for query in self.query]

    def pick(self, index: int) -> Sequences:
        return Sequences([self.query[index]], [self.key[index]], [self.value[index]])


def run_paged(
    sequences: Sequences,
    *,
    chunks: list[int] | int = 10_000,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    poison_left_of_window: bool = False,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return every sequence's output, computed in steps of `chunks` tokens: one size, or one each."""
    lengths = np.array(sequences.lengths)
    chunk = np.full(len(lengths), chunks) if isinstance(chunks, int) else np.array(chunks)
    _, kv_heads, head_dim = sequences.key[0].shape
    needed = -(-lengths // block_size)
    num_blocks = int(needed.sum()) + 2
    cache = torch.full((num_blocks, 3, 2, kv_heads, block_size, head_dim), float("nan"))
    key_blocks, value_blocks = cache[:, 1, 0], cache[:, 1, 1]
    order = np.random.default_rng(seed).permutation(num_blocks)
    tables = np.full((len(lengths), needed.max()), 2**31 - 1)
    for row, (start, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        tables[row, :count] = order[start : start + count]

    def now(states: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([states[s][done[s] : done[s] + n] for s, n in zip(running, counts, strict=True)])

    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = np.zeros_like(lengths)
    while len(running := np.flatnonzero(done < lengths)):
        counts = np.minimum(chunk[running], (lengths - done)[running])
        batch = AttentionBatch.build(done[running], counts, tables[running], block_size)
        write_kv(now(sequences.key), now(sequences.value), key_blocks, value_blocks, batch)
        if poison_left_of_window:
            for s in running:
                unseen = np.arange(max(done[s] - window + 1, 0))
                cache[tables[s, unseen // block_size], 1, :, :, unseen % block_size] = float("nan")
        scale = head_dim**-0.5
        attended = paged_attention(
            now(sequences.query), key_blocks, value_blocks, batch, scale=scale, window=window, softcap=softcap
        )
        for s, part in zip(running, attended.split(counts.tolist()), strict=True):
            outputs[s].append(part)
        done[running] += counts
    return [torch.cat(parts) for parts in outputs]


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int, softcap: float
) -> torch.Tensor:
    """Attention of one whole sequence in float64, as in the textbook."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (states.double() for states in (query, key, value))
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(len(query))
    hidden = place[None, :] > place[:, None]
    if window:
        hidden |= place[None, :] <= place[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
