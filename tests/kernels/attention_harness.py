"""Random ragged attention over a shuffled, poisoned paged cache, beside a plain float64 attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from caches import make_cache
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.kv_quantizers import Int4PageQuantizer, quantize_heads
from quire.kernels.bounds import SCORE_UNIT
from quire.kernels.reference import ReferenceKernels, write_kv

_PAGED_ATTENTION = ReferenceKernels().paged_attention


@dataclasses.dataclass
class Sequences:
    """Queries, keys and values of whole sequences: lists of [length, heads, head_dim or value_dim]."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]

    @classmethod
    def random(
        cls,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int = 0,
        *,
        seed: int = 0,
        shared: int = 0,
    ) -> Sequences:
        """Return sequences whose first `shared` tokens are the same; 0: values are as long as keys."""
        generator = torch.Generator().manual_seed(seed)

        def states(count: int, size: int = head_dim) -> list[torch.Tensor]:
            all_states = [torch.randn(length, count, size, generator=generator) for length in lengths]
            for other in all_states[1:]:
                other[:shared] = all_states[0][:shared]
            return all_states

        return cls(states(heads), states(kv_heads), states(kv_heads, value_dim or head_dim))

    @property
    def lengths(self) -> list[int]:
        return [len(query) for query in self.query]

    def pick(self, index: int) -> Sequences:
        return Sequences([self.query[index]], [self.key[index]], [self.value[index]])

    def as_cached(self, dtype: torch.dtype, kv_dtype: torch.dtype | str) -> Sequences:
        """Return what is left of the numbers in a model of `dtype` with a cache of `kv_dtype`."""

        def cached(states: torch.Tensor) -> torch.Tensor:
            if kv_dtype == "int4":
                return decoded_int4(*Int4PageQuantizer().quantize(states.to(dtype)))
            if kv_dtype != torch.int8:
                return states.to(dtype).to(kv_dtype)
            numbers, scales = quantize_heads(states.to(dtype))
            return numbers.double() * scales.double().unsqueeze(-1)

        return Sequences(
            [query.to(dtype) for query in self.query],
            [cached(key) for key in self.key],
            [cached(value) for value in self.value],
        )


def decoded_int4(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return vectors of Int4PageQuantizer in float64, by products with the matrix that it rotates by."""
    features = torch.stack([numbers % 16, numbers // 16], -1).flatten(-2).double() - 8
    return features * scales.double().unsqueeze(-1) @ hadamard(features.shape[-1])


def hadamard(size: int) -> torch.Tensor:
    """Return the orthogonal matrix of Hadamard matrices, as large as go into `size`, along the diagonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(matrix)) == 0:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return torch.block_diag(*[matrix * len(matrix) ** -0.5] * (size // len(matrix)))


def run_paged(
    sequences: Sequences,
    *,
    kernel: Any = _PAGED_ATTENTION,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | str | None = None,
    chunks: list[int] | int = 10_000,
    first_chunks: list[int] | None = None,
    block_size: int = 16,
    shared: int = 0,
    poison_left_of_window: bool = False,
    seed: int = 0,
    sparse: Callable[..., dict[str, Any]] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Return every sequence's output, computed in steps of `chunks` tokens: one size, or one each.

    Args:
        sequences: what to compute.
        kernel: the `paged_attention` to use; it gets `options`.
        dtype: of the queries.
        kv_dtype: of the cache; None: `dtype`.
        chunks: tokens of each sequence in one step.
        first_chunks: tokens of each sequence in the first step; None: as in all others.
        block_size: of the cache.
        shared: tokens that the sequences have in common and that lie in the same blocks.
        poison_left_of_window: overwrite with NaN what no window reaches any more.
        seed: of the blocks' order.
        sparse: returns options of each step's batch, for the running sequences, their computed tokens, and
            the step's tokens.
        options: of the kernel.
    """
    lengths = np.array(sequences.lengths)
    chunk = np.full(len(lengths), chunks) if isinstance(chunks, int) else np.array(chunks)
    _, kv_heads, head_dim = sequences.key[0].shape
    needed = -(-lengths // block_size)
    num_blocks = int(needed.sum()) + 2
    value_dim = sequences.value[0].shape[-1]
    cache = make_cache(num_blocks, 3, kv_heads, block_size, head_dim, kv_dtype or dtype, value_dim)
    cache.tensor.view(torch.uint8).fill_(255)  # NaN as any type of floats
    kv = cache.views[1]
    order = np.random.default_rng(seed).permutation(num_blocks)
    tables = np.full((len(lengths), needed.max()), 2**31 - 1)
    for row, (start, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        tables[row, :count] = order[start : start + count]
    tables[:, : shared // block_size] = tables[0, : shared // block_size]

    def now(states: list[torch.Tensor]) -> torch.Tensor:
        parts = [states[s][done[s] : done[s] + n] for s, n in zip(running, counts, strict=True)]
        return torch.cat(parts).to(dtype)

    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = np.zeros_like(lengths)
    while len(running := np.flatnonzero(done < lengths)):
        planned = chunk if first_chunks is None or done.any() else np.array(first_chunks)
        counts = np.minimum(planned[running], (lengths - done)[running])
        step_options = {} if sparse is None else sparse(running, done[running], counts)
        batch = AttentionBatch.build(done[running], counts, tables[running], block_size, **step_options)
        key, value = now(sequences.key), now(sequences.value)
        write_kv(key, value, kv, batch)
        if poison_left_of_window:
            for s in running:
                unseen = np.arange(max(done[s] - options["window"] + 1, 0))
                for pages in (kv.key_pages, kv.value_pages):
                    pages[:, tables[s, unseen // block_size], unseen % block_size] = float("nan")
        query = now(sequences.query)
        # As in a model, queries lie beside something else, and results go where something was.
        query = torch.cat([query, torch.full_like(query, float("nan"))], dim=1)[:, : query.shape[1]]
        out = torch.full((*query.shape[:-1], value_dim), float("nan"), dtype=dtype)
        attended = kernel(query, kv, batch, scale=head_dim**-0.5, out=out, **options)
        assert attended is out
        for s, part in zip(running, attended.split(counts.tolist()), strict=True):
            outputs[s].append(part)
        done[running] += counts
    return [torch.cat(parts) for parts in outputs]


def naive_attention(
    sequences: Sequences,
    index: int = 0,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one whole sequence in float64, as in the textbook."""
    return naive_weights_and_values(sequences, index, window=window, softcap=softcap, sinks=sinks)[1]


def naive_weights_and_values(
    sequences: Sequences,
    index: int,
    *,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [heads, length - first, length] too, of the queries from `first` on."""
    query, key, value = (part[index].double() for part in (sequences.query, sequences.key, sequences.value))
    length, query = len(query), query[first:]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_place, query_place = torch.arange(length)[None, :], torch.arange(first, length)[:, None]
    hidden = key_place > query_place
    if window:
        hidden |= key_place <= query_place - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[:, :, :length]
    return weights, torch.einsum("hqk,khd->qhd", weights, value)


@dataclasses.dataclass
class ScoredStep:
    """A step of random sequences, of which the first two share blocks."""

    sequences: Sequences
    kv: KVLayer
    tables: np.ndarray[Any, np.dtype[np.int64]]
    block_size: int

    LENGTHS = (150, 200, 1, 71, 1100)
    COUNTS = (30, 70, 1, 1, 9)

    @classmethod
    def random(cls, block_size: int) -> ScoredStep:
        sequences = Sequences.random([150, 200], 6, 2, 32, shared=128)
        others = Sequences.random([1, 71, 1100], 6, 2, 32, seed=1)
        states = [[*ours, *theirs] for ours, theirs in zip(_parts(sequences), _parts(others), strict=True)]
        sequences = Sequences(*states)
        lengths = np.array(cls.LENGTHS)
        needed = -(-lengths // block_size)
        tables = np.arange(len(lengths) * needed.max()).reshape(len(lengths), -1)
        tables[1, : 128 // block_size] = tables[0, : 128 // block_size]
        cache = make_cache(tables.size, 1, 2, block_size, 32, torch.float32)
        cache.tensor.fill_(float("nan"))
        whole = AttentionBatch.build(np.zeros(len(lengths), dtype=np.int64), lengths, tables, block_size)
        write_kv(torch.cat(sequences.key), torch.cat(sequences.value), cache.views[0], whole)
        return cls(sequences, cache.views[0], tables, block_size)

    def scores(
        self,
        kernel: Any,
        counts: Sequence[int] = COUNTS,
        *,
        first: Sequence[int],
        summed: Sequence[bool],
        which: Sequence[int] = range(5),
        ends: Sequence[int] = LENGTHS,
        **options: Any,
    ) -> tuple[torch.Tensor, KeyScores]:
        """Return the attention and the key scores of a step of the sequences `which`.

        Args:
            kernel: the `paged_attention` to use; it gets `options`.
            counts: last tokens of each of the five sequences, which the step computes.
            first: of these tokens, for each sequence, the first one that scores.
            summed: whether the scores of a sequence are summed.
            which: sequences that are in the step.
            ends: tokens of each sequence after the step.
            options: of the kernel.
        """
        sequences = list(which)
        lengths, chosen = np.array(ends)[sequences], np.array(counts)[sequences]
        step = AttentionBatch.build(
            lengths - chosen,
            chosen,
            self.tables[sequences],
            self.block_size,
            first_scoring_token=np.array(first)[sequences],
            sums_scores=np.array(summed)[sequences],
        )
        query = [self.sequences.query[s][ends[s] - counts[s] : ends[s]] for s in sequences]
        assert step.key_scores is not None
        step.key_scores.rows.fill_(float("nan"))
        step.key_scores.sums.fill_(-1)
        return kernel(torch.cat(query), self.kv, step, scale=32**-0.5, **options), step.key_scores


def check_key_scores(kernel: Any, *, block_size: int, window: int) -> None:
    """Compare the key scores of a ragged step with float64 ones."""
    scored = ScoredStep.random(block_size)
    options = {"window": window, "softcap": 3.0, "sinks": torch.linspace(-1, 2, 6)}
    first, summed = [0, 60, 0, 1, 2], [True, False, False, False, True]
    _, scores = scored.scores(kernel, first=first, summed=summed, **options)
    for index, (length, count) in enumerate(zip(scored.LENGTHS, scored.COUNTS, strict=True)):
        scoring = length - count + first[index]
        weights, _ = naive_weights_and_values(scored.sequences, index, **options, first=scoring)
        expected = weights.sum(0)
        if summed[index]:
            sums = scores.sums_of(index)[0].double() * SCORE_UNIT
            torch.testing.assert_close(sums, expected.sum(0), atol=2e-5, rtol=0)
        else:
            rows = scores.rows_of(index)[0]
            assert rows.shape == (count - first[index], length)
            torch.testing.assert_close(rows.double(), expected, atol=2e-5, rtol=0)


def check_bits_of_key_scores(kernel: Any, **options: Any) -> None:
    """Compare the bits of key scores in company, alone, and in chunks."""
    scored = ScoredStep.random(16)
    rows, sums = [False] * 5, [True] * 5
    first = [0] * 5
    attended, scores = scored.scores(kernel, first=first, summed=rows, **options)
    summed_attended, all_sums = scored.scores(kernel, first=first, summed=sums, **options)
    assert torch.equal(attended, summed_attended)
    silent = kernel_without_scores(scored, kernel, **options)
    assert torch.equal(attended, silent)
    for s, count in enumerate(scored.COUNTS):
        alone = scored.scores(kernel, first=first, summed=rows, which=[s], **options)[1].rows_of(0)[0]
        assert torch.equal(alone, scores.rows_of(s)[0])
        total = torch.zeros_like(all_sums.sums_of(s)[0])
        for end in range(count, 0, -7):  # in chunks of 7, the last chunk first
            chunk, ends = [min(end, 7)] * 5, [length - count + end for length in scored.LENGTHS]
            part, row_part = (
                scored.scores(kernel, chunk, first=first, summed=kind, which=[s], ends=ends, **options)[1]
                for kind in (sums, rows)
            )
            total[: len(part.sums_of(0)[0])] += part.sums_of(0)[0]
            expected = scores.rows_of(s)[0][end - chunk[0] : end]
            assert torch.equal(row_part.rows_of(0)[0], expected[:, : ends[s]])
            assert not expected[:, ends[s] :].any()
        assert torch.equal(total, all_sums.sums_of(s)[0])


def kernel_without_scores(scored: ScoredStep, kernel: Any, **options: Any) -> torch.Tensor:
    """Return the attention of the step if nobody wants its key scores."""
    counts, lengths = np.array(scored.COUNTS), np.array(scored.LENGTHS)
    step = AttentionBatch.build(
        lengths - counts, counts, scored.tables, scored.block_size, first_scoring_token=counts
    )
    assert step.key_scores is None
    query = [part[-count:] for part, count in zip(scored.sequences.query, scored.COUNTS, strict=True)]
    attended: torch.Tensor = kernel(torch.cat(query), scored.kv, step, scale=32**-0.5, **options)
    return attended


def _parts(sequences: Sequences) -> tuple[list[torch.Tensor], ...]:
    return sequences.query, sequences.key, sequences.value
