"""Sparse prefill in both sets of kernels: against float64 attention under masks from plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from attention_harness import Sequences, run_paged
from native_settings import on_instruction_sets, threads

from quire.kernels import bounds
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.reference import ReferenceKernels

KERNELS = [NativeKernels().paged_attention, ReferenceKernels().paged_attention]
THRESHOLD, SIZE, STRIDE = 0.7, 64, 8
BoolArray = npt.NDArray[np.bool_]


# -- in plain loops ----------------------------------------------------------------------------------------


def masked_weights(
    sequences: Sequences, index: int, hidden: BoolArray, *, softcap: float = 0.0
) -> torch.Tensor:
    """Return attention weights in float64; `hidden` [heads, length, length] says which keys are left out."""
    query, key = sequences.query[index].double(), sequences.key[index].double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future | torch.from_numpy(hidden), -torch.inf).softmax(-1)


def masked_attention(
    sequences: Sequences, index: int, hidden: BoolArray, *, softcap: float = 0.0
) -> torch.Tensor:
    weights = masked_weights(sequences, index, hidden, softcap=softcap)
    value = sequences.value[index].double()
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def chunk_bounds(length: int, chunk: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def skipping_mask(length: int, chunk: int, heads: int, gap: Callable[[int], tuple[int, int]]) -> BoolArray:
    hidden = np.zeros((heads, length, length), dtype=bool)
    for start, end in chunk_bounds(length, chunk):
        first, last = gap(start)
        hidden[:, start:end, first:last] = True
    return hidden


def selecting_mask(
    query: npt.NDArray[np.float64], key: npt.NDArray[np.float64], chunk: int, dense_from: int, softcap: float
) -> BoolArray:
    """Return what is not selected, [heads, length, length], of query and key [length, heads, head_dim]."""
    length, num_heads, _ = query.shape
    hidden = np.zeros((num_heads, length, length), dtype=bool)
    for chunk_start, chunk_end in chunk_bounds(length, chunk):
        end = min(chunk_end, dense_from)
        block_starts = sorted({chunk_start, *range(-(-chunk_start // SIZE) * SIZE, end, SIZE)})
        for start, stop in itertools.pairwise([*[s for s in block_starts if s < end], end]):
            for head in range(num_heads):
                kept = selected_blocks(query[:, head], key[:, head], start, stop, chunk_end, softcap)
                for block in set(range(start // SIZE + 1)) - kept:
                    hidden[head, start:stop, block * SIZE : (block + 1) * SIZE] = True
    return hidden


def selected_blocks(
    query: npt.NDArray[np.float64],
    key: npt.NDArray[np.float64],
    start: int,
    stop: int,
    num_keys: int,
    softcap: float,
) -> set[int]:
    """Return the key blocks that the queries from `start` to `stop` of one head select."""
    own = start // SIZE
    masses = np.zeros(own + 1)
    for row in range(start // STRIDE, (stop - 1) // STRIDE + 1):
        means = []
        for column in range(row + 1):
            total = 0.0
            for i in range(STRIDE):
                q, k = row * STRIDE + STRIDE - 1 - i, column * STRIDE + i
                if start <= q < stop and k < num_keys:
                    total += float(query[q] @ key[k])
            mean = total / STRIDE * query.shape[1] ** -0.5
            means.append(softcap * math.tanh(mean / softcap) if softcap else mean)
        weights = np.exp(np.array(means) - max(means))
        for column, weight in enumerate(weights / weights.sum()):
            masses[column * STRIDE // SIZE] += weight
    kept = {0, own}
    for block in sorted(range(1, own), key=lambda block: (-masses[block], block)):
        if masses[list(kept)].sum() >= THRESHOLD * masses.sum():
            break
        kept.add(block)
    return kept


# -- as the kernels are asked ------------------------------------------------------------------------------


def selecting(dense_from: int) -> Callable[..., dict[str, Any]]:
    def options(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        end = np.full(len(done), dense_from)
        return {"key_selection": KeySelection(end, THRESHOLD, SIZE, STRIDE)}

    return options


def skipping(gap: Callable[[int], tuple[int, int]]) -> Callable[..., dict[str, Any]]:
    def options(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        gaps = np.array([gap(int(start)) for start in done])
        return {"skipped_keys": SkippedKeys(gaps[:, 0].copy(), gaps[:, 1].copy())}

    return options


def spiky(lengths: list[int], shape: tuple[int, int, int], **options: Any) -> Sequences:
    """Return sequences in which some key blocks matter far more than others."""
    sequences = Sequences.random(lengths, *shape, **options)
    generator = np.random.default_rng(1)
    for query, key in zip(sequences.query, sequences.key, strict=True):
        direction = torch.randn(shape[2], generator=torch.Generator().manual_seed(7))
        query.add_(direction, alpha=0.3)
        for block in range(0, len(key), SIZE):
            key[block : block + SIZE] += direction * float(generator.normal()) * 0.5
    return sequences


def small_gap(start: int) -> tuple[int, int]:
    """Return keys within one tile and beyond: 16 at the start and 16 before the chunk stay."""
    return (16, start // 16 * 16 - 16) if start // 16 > 2 else (0, 0)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("chunk", [50, 160])
def test_skipped_keys_are_left_out(chunk: int) -> None:
    sequences = Sequences.random([300, 75, 2300], 4, 2, 32, shared=64)
    gaps = small_gap if chunk == 50 else lambda start: (128, max(128, start // 16 * 16 - 256))
    hidden = [skipping_mask(length, chunk, 4, gaps) for length in sequences.lengths]
    expected = [masked_attention(sequences, index, hidden[index]) for index in range(3)]
    for kernel in KERNELS:
        outputs = run_paged(sequences, kernel=kernel, chunks=chunk, sparse=skipping(gaps), shared=64)
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
@pytest.mark.parametrize(
    ("chunk", "softcap", "shape"),
    [(128, 0.0, (4, 2, 32)), (100, 0.0, (3, 3, 48)), (1000, 2.0, (3, 1, 16))],
    ids=["aligned", "unaligned", "whole"],
)
def test_selected_keys_are_those_of_plain_loops(
    kernel: Any, chunk: int, softcap: float, shape: tuple[int, int, int]
) -> None:
    sequences = spiky([500, 70, 330], shape)
    dense_from = 384
    outputs = run_paged(
        sequences, kernel=kernel, chunks=chunk, sparse=selecting(dense_from), softcap=softcap, block_size=16
    )
    num_hidden = 0
    for index, output in enumerate(outputs):
        query, key = sequences.query[index].double(), sequences.key[index].double()
        key = key.repeat_interleave(shape[0] // shape[1], dim=1)
        hidden = selecting_mask(query.numpy(), key.numpy(), chunk, dense_from, softcap)
        num_hidden += hidden.sum()
        expected = masked_attention(sequences, index, hidden, softcap=softcap)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert num_hidden > 10_000


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(
    types={
        "float32": (torch.float32, torch.float32),
        "bfloat16": (torch.bfloat16, torch.bfloat16),
        "float16": (torch.float16, torch.float16),
        "bfloat16_over_int8": (torch.bfloat16, torch.int8),
        "float32_over_int4": (torch.float32, "int4"),
    }
)
def test_native_kernels_select_what_the_reference_selects(
    instruction_set: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    sequences = spiky([700, 130], (4, 2, 48))
    how = {"dtype": types[0], "kv_dtype": types[1], "chunks": 256, "sparse": selecting(10_000)}
    expected = run_paged(sequences, kernel=KERNELS[1], **how)
    outputs = run_paged(sequences, kernel=KERNELS[0], **how)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[types[0]]
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.float(), other.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
@pytest.mark.parametrize("sparse", [selecting(10_000), skipping(small_gap)], ids=["selecting", "skipping"])
def test_bits_do_not_depend_on_company_blocks_or_threads(
    kernel: Any, sparse: Callable[..., dict[str, Any]]
) -> None:
    sequences = spiky([500, 1200, 200], (4, 2, 32))
    how: dict[str, Any] = {"kernel": kernel, "sparse": sparse, "chunks": 192}
    together = run_paged(sequences, **how)
    for index in range(3):
        with threads(3 - index):
            alone = run_paged(sequences.pick(index), seed=index, block_size=(16, 32, 4)[index], **how)
        assert torch.equal(together[index], alone[0])


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
def test_chunks_of_whole_query_blocks_select_the_same(kernel: Any) -> None:
    sequences = spiky([700], (4, 2, 32))
    how: dict[str, Any] = {"kernel": kernel, "sparse": selecting(10_000)}
    whole = run_paged(sequences, chunks=10_000, **how)[0]
    for chunk in (64, 192):
        assert torch.equal(run_paged(sequences, chunks=chunk, **how)[0], whole)


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
def test_who_leaves_nothing_out_has_the_same_bits(kernel: Any) -> None:
    sequences = spiky([500, 300], (4, 2, 32))
    dense = run_paged(sequences, kernel=kernel, chunks=128)

    def first_selects(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        return {"key_selection": KeySelection(np.where(running == 0, 400, 0), THRESHOLD, SIZE, STRIDE)}

    outputs = run_paged(sequences, kernel=kernel, chunks=128, sparse=first_selects)
    assert torch.equal(outputs[1], dense[1])
    assert not torch.equal(outputs[0], dense[0])
    windowed = run_paged(sequences, kernel=kernel, chunks=128, window=100)
    sparse = run_paged(sequences, kernel=kernel, chunks=128, window=100, sparse=selecting(400))
    assert all(torch.equal(*pair) for pair in zip(windowed, sparse, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
def test_what_is_not_a_number_stays_with_its_query_block(kernel: Any) -> None:
    sequences = spiky([400, 300], (4, 2, 32))
    how: dict[str, Any] = {"kernel": kernel, "sparse": selecting(10_000), "chunks": 10_000}
    expected = run_paged(sequences, **how)
    sequences.query[0][200] = float("nan")
    outputs = run_paged(sequences, **how)
    assert torch.equal(outputs[1], expected[1])
    assert outputs[0][200].isnan().all()
    same = torch.ones(400, dtype=torch.bool)
    same[192:256] = False  # sees all keys, as nobody knows which matter
    assert torch.equal(outputs[0][same], expected[0][same])
    assert outputs[0].isnan().any(-1).any(-1).sum() == 1


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("sums", [False, True], ids=["rows", "sums"])
@pytest.mark.parametrize("kernel", KERNELS, ids=["native", "reference"])
def test_key_scores_of_selected_keys(kernel: Any, sums: bool) -> None:
    sequences = spiky([400, 300], (4, 2, 32))
    captured: list[KeyScores] = []

    def noting(query: Any, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        attended: torch.Tensor = kernel(query, kv, batch, **options)
        assert batch.key_scores is not None
        captured.append(batch.key_scores)
        return attended

    def scoring(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        scores = {"first_scoring_token": np.array([150, 299]), "sums_scores": np.array([sums, sums])}
        return selecting(10_000)(running, done, counts) | scores

    run_paged(sequences, kernel=noting, sparse=scoring)
    for index, first in enumerate((150, 299)):
        query, key = (
            sequences.query[index].double(),
            sequences.key[index].double().repeat_interleave(2, dim=1),
        )
        hidden = selecting_mask(query.numpy(), key.numpy(), 10_000, 10_000, 0.0)
        weights = masked_weights(sequences, index, hidden).sum(0)[first:]
        if sums:
            scores, expected = captured[0].sums_of(index)[0].double() * bounds.SCORE_UNIT, weights.sum(0)
        else:
            scores, expected = captured[0].rows_of(index)[0].double(), weights
        torch.testing.assert_close(scores, expected, atol=2e-5, rtol=0)


def test_a_sequence_that_skips_keys_does_not_score() -> None:
    with pytest.raises(ValueError, match="skips keys"):
        AttentionBatch.build(
            np.array([64]), np.array([2]), np.zeros((1, 5)), 16,
            first_scoring_token=np.array([0]),
            skipped_keys=SkippedKeys(np.array([16]), np.array([32])),
        )  # fmt: skip


def test_the_largest_stride_is_that_of_the_native_kernels() -> None:
    assert bounds.MAX_STRIDE == _native.MAX_STRIDE
