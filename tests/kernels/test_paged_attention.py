"""Paged attention against a textbook attention in float64, and its bits against themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_harness import (
    Sequences,
    check_bits_of_key_scores,
    check_key_scores,
    decoded_int4,
    hadamard,
    naive_attention,
    run_paged,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pairwise import pairwise
from quire.kernels.attention import tiles
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_quantizers import Int4PageQuantizer, quantize_heads
from quire.kernels.reference import ReferenceKernels
from unmutated import UNMUTATED

SHAPES = [(4, 4, 16), (4, 2, 24), (3, 1, 32), (8, 1, 64), (14, 2, 64), (6, 6, 80), (2, 1, 128)]
LENGTHS = [1, 5, 64, 65, 200]


@settings(max_examples=24, derandomize=True, backend=UNMUTATED)
@given(
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 3, 8, 9, 50, 10_000]),
    block_size=st.sampled_from([1, 4, 7, 16, 32, 64, 128]),
    window=st.sampled_from([0, 0, 1, 2, 33, 64, 100]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_textbook_attention(
    shape: tuple[int, int, int],
    lengths: list[int],
    chunk: int,
    block_size: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    seed: int,
) -> None:
    sinks = torch.randn(shape[0], generator=torch.Generator().manual_seed(seed)) if has_sinks else None
    if chunk == 1:
        lengths = [min(length, 40) for length in lengths]
    sequences = Sequences.random(lengths, *shape, seed=seed)
    outputs = run_paged(
        sequences,
        chunks=chunk,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
        seed=seed,
    )
    for index, output in enumerate(outputs):
        expected = naive_attention(sequences, index, window=window, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(output.double(), expected, atol=5e-6, rtol=0)


@pytest.mark.formats
@pytest.mark.first_case
@pairwise(shape=SHAPES, window=[0, 70])
def test_bits_do_not_depend_on_chunks_blocks_or_company(shape: tuple[int, int, int], window: int) -> None:
    sequences = Sequences.random(LENGTHS, *shape)
    alone = [run_paged(sequences.pick(i), window=window)[0] for i in range(len(LENGTHS))]
    settings_to_try = [
        {"chunks": 10_000, "block_size": 4},
        {"chunks": 7, "block_size": 16},
        {"first_chunks": [1, 5, 30, 64, 100], "chunks": [1, 5, 2, 64, 33], "block_size": 128},
        {"first_chunks": [1, 1, 64, 40, 120], "chunks": [1, 1, 64, 1, 3], "block_size": 10},
    ]
    for seed, setting in enumerate(settings_to_try):
        outputs = run_paged(sequences, window=window, seed=seed, **setting)
        assert all(torch.equal(output, one) for output, one in zip(outputs, alone, strict=True)), setting


def test_bits_do_not_depend_on_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences.random(LENGTHS, 4, 2, 32)
    expected = run_paged(sequences, chunks=100)
    monkeypatch.setattr(tiles, "SCRATCH_FLOATS", 1)
    assert all(torch.equal(*pair) for pair in zip(run_paged(sequences, chunks=100), expected, strict=True))


@pytest.mark.formats
@pytest.mark.first_case
@pairwise(chunk=[1, 20])
def test_keys_left_of_every_window_are_never_read(chunk: int) -> None:
    sequences = Sequences.random([150, 90], 4, 2, 16)
    expected = run_paged(sequences, chunks=chunk, window=30)
    poisoned = run_paged(sequences, chunks=chunk, window=30, poison_left_of_window=True)
    assert all(torch.equal(*pair) for pair in zip(poisoned, expected, strict=True))


def test_a_broken_sequence_does_not_touch_its_company() -> None:
    sequences = Sequences.random([70, 70, 70], 4, 2, 16)
    expected = run_paged(sequences, chunks=[1, 9, 70])
    sequences.value[1][3:] = float("nan")
    sequences.key[1][5:] = float("inf")
    outputs = run_paged(sequences, chunks=[1, 9, 70])
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[2], expected[2])
    assert outputs[1][3:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    sequences = Sequences.random([130], 2, 2, 16)
    for query in sequences.query:
        query.mul_(1000)
    output = run_paged(sequences)[0]
    expected = naive_attention(sequences)
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=0)


@pairwise(dtype=[torch.float32, torch.bfloat16], kv_dtype=[torch.int8, "int4"])
def test_narrow_keys_and_values_are_numbers_times_scales(
    dtype: torch.dtype, kv_dtype: torch.dtype | str
) -> None:
    sequences = Sequences.random([70, 5, 130], 4, 2, 24)
    outputs = run_paged(sequences, chunks=40, dtype=dtype, kv_dtype=kv_dtype)
    cached = sequences.as_cached(dtype, kv_dtype)
    for index, output in enumerate(outputs):
        tolerance = 5e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(
            output.double(), naive_attention(cached, index), atol=tolerance, rtol=tolerance
        )


def test_int8_is_off_by_half_a_step_at_most() -> None:
    states = torch.randn(100, 3, 16) * 10 ** torch.linspace(-6, 6, 100).view(-1, 1, 1)
    states[7] = 0.0
    numbers, scales = quantize_heads(states)
    assert numbers.abs().amax(-1).eq(127).sum() == 99 * 3
    error = (numbers * scales.unsqueeze(-1) - states).abs()
    assert (error <= 0.5001 * scales.unsqueeze(-1)).all()
    assert (scales[7] == 0).all()
    assert (numbers[7] == 0).all()


@pairwise(size=[16, 24, 80, 128, 576])
def test_int4_is_off_by_half_a_step_of_rotated_features_at_most(size: int) -> None:
    states = torch.randn(100, 3, size) * 10 ** torch.linspace(-6, 6, 100).view(-1, 1, 1)
    states[7] = 0.0
    states[8, :, 1] *= 1_000  # an outlier
    numbers, scales = Int4PageQuantizer().quantize(states)
    assert numbers.shape == (100, 3, size // 2)
    decoded = decoded_int4(numbers, scales)
    error = ((decoded - states.double()) @ hadamard(size)).abs()
    assert (error <= 0.5001 * scales.unsqueeze(-1)).all()
    assert (scales[7] == 0).all()
    own = Int4PageQuantizer().dequantize(numbers, scales)
    assert ((own.double() - decoded).abs() <= 1e-5 * scales.unsqueeze(-1)).all()


@pairwise(block_size=[16, 7, 128], window=[0, 50])
def test_key_scores_are_sums_of_weights(block_size: int, window: int) -> None:
    check_key_scores(ReferenceKernels().paged_attention, block_size=block_size, window=window)


@pairwise(window=[0, 50])
def test_key_scores_do_not_depend_on_company_and_chunks(window: int) -> None:
    check_bits_of_key_scores(ReferenceKernels().paged_attention, window=window)


def test_batch_places_tokens_as_a_loop_would() -> None:
    rng = np.random.default_rng(3)
    computed, counts = rng.integers(0, 60, 9), rng.integers(1, 30, 9)
    tables = rng.permutation(200)[: 9 * 20].reshape(9, 20)
    batch = AttentionBatch.build(computed, counts, tables, 5)
    expected = [
        (position, tables[s, position // 5] * 5 + position % 5)
        for s in range(9)
        for position in range(computed[s], computed[s] + counts[s])
    ]
    places = (batch.slot_blocks * 5 + batch.slot_offsets).tolist()
    assert list(zip(batch.positions.tolist(), places, strict=True)) == expected
    assert batch.num_tokens.tolist() == counts.tolist()
    assert batch.num_cached_tokens.tolist() == computed.tolist()


def test_evicted_tokens_leave_their_places_but_not_their_positions() -> None:
    computed, counts, evicted = np.array([40, 7]), np.array([3, 2]), np.array([25, 0])
    tables = np.arange(20).reshape(2, 10)
    batch = AttentionBatch.build(computed, counts, tables, 5, num_evicted_tokens=evicted)
    assert batch.positions.tolist() == [40, 41, 42, 7, 8]
    assert batch.slot_blocks.tolist() == [3, 3, 3, 11, 11]
    assert batch.slot_offsets.tolist() == [0, 1, 2, 2, 3]
    assert batch.num_cached_tokens.tolist() == [15, 7]


def test_plan_is_shared_between_layers_of_one_shape() -> None:
    batch = AttentionBatch.build(np.array([3]), np.array([1]), np.array([[0]]), 16)
    heads = tiles.HeadLayout(4, 2, 16)
    assert batch.plan(heads, 0) is batch.plan(tiles.HeadLayout(4, 2, 16), 0)
    assert batch.plan(heads, 0) is not batch.plan(heads, 8)
