"""The native paged attention: against float64 attention, and its bits against themselves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention_harness import (
    Sequences,
    check_bits_of_key_scores,
    check_key_scores,
    naive_attention,
    run_paged,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_settings import on_instruction_sets, threads

from caches import make_cache
from pairwise import pairwise
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.bounds import SCORE_UNIT
from quire.kernels.cpu import _native
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.reference import ReferenceKernels
from quire.kv import PagedAttentionCache
from unmutated import UNMUTATED

paged_attention = NativeKernels().paged_attention
SHAPES = [(4, 2, 64), (6, 6, 80), (3, 1, 96), (4, 2, 128), (2, 1, 256), (14, 2, 32), (5, 1, 16), (9, 1, 576)]
SHAPES += [(4, 2, 192, 128), (6, 2, 48, 96)]  # of which heads of values have another size
TYPES = {  # of the query and of the cache
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32_over_int8": (torch.float32, torch.int8),
    "bfloat16_over_int8": (torch.bfloat16, torch.int8),
    "float32_over_int4": (torch.float32, "int4"),
    "bfloat16_over_int4": (torch.bfloat16, "int4"),
    "bfloat16_over_float32": (torch.bfloat16, torch.float32),
}
# Absolute and relative. Results are rounded to the query's type; with bfloat16, weights are too.
TOLERANCES = {torch.float32: (5e-6, 0.0), torch.bfloat16: (2**-7, 2**-7), torch.float16: (2**-11, 2**-10)}
LENGTHS = [1, 5, 64, 65, 200]


@pytest.fixture(params=[2, 5], ids="threads{}".format)
def several_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(request.param):
        yield


def check_against_naive(
    sequences: Sequences, outputs: list[torch.Tensor], types: tuple[torch.dtype, torch.dtype], **options: Any
) -> None:
    cached = sequences.as_cached(*types)
    expected = [naive_attention(cached, index, **options) for index in range(len(outputs))]
    assert_close_to(expected, outputs, types)


def assert_close_to(
    expected: list[torch.Tensor], outputs: list[torch.Tensor], types: tuple[torch.dtype, torch.dtype]
) -> None:
    atol, rtol = TOLERANCES[types[0]]
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.double(), wanted, atol=atol, rtol=rtol)


def assert_equal_bits(outputs: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True)), what


@settings(
    max_examples=36,
    backend=UNMUTATED,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.sampled_from(SHAPES),
    types=st.sampled_from(list(TYPES.values())),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 3, 8, 50, 10_000]),
    block_size=st.sampled_from([1, 4, 7, 16, 64, 128]),
    window=st.sampled_from([0, 0, 1, 2, 33, 64, 100]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_textbook_attention(
    instruction_set: str,
    shape: tuple[int, ...],
    types: tuple[torch.dtype, torch.dtype],
    lengths: list[int],
    chunk: int,
    block_size: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    seed: int,
) -> None:
    if chunk == 1:
        lengths = [min(length, 30) for length in lengths]
    sinks = torch.randn(shape[0], generator=torch.Generator().manual_seed(seed)) if has_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    sequences = Sequences.random(lengths, *shape, seed=seed)
    outputs = run_paged(
        sequences,
        kernel=paged_attention,
        dtype=types[0],
        kv_dtype=types[1],
        chunks=chunk,
        block_size=block_size,
        seed=seed,
        **options,
    )
    check_against_naive(sequences, outputs, types, **options)


@on_instruction_sets(kv_dtype=[torch.int8, "int4"], head_dim=[16, 80, 128])
def test_keys_and_values_in_bytes_lose_nothing_but_the_rounding_of_results(
    instruction_set: str, kv_dtype: Any, head_dim: int
) -> None:
    if instruction_set == "amx":
        pytest.skip("rounds weights to bfloat16")
    types = torch.bfloat16, kv_dtype
    sequences = Sequences.random([200, 70], 6, 2, head_dim)
    outputs = run_paged(sequences, kernel=paged_attention, dtype=types[0], kv_dtype=types[1], chunks=[1, 60])
    cached = sequences.as_cached(*types)
    for index, output in enumerate(outputs):
        expected = naive_attention(cached, index)
        torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=2**-8)


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(
    types={name: TYPES[name] for name in ("float32", "bfloat16_over_int8", "float32_over_int4")}
)
def test_long_sequences_are_merged_from_spans(
    instruction_set: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    for window in (0, 1100):
        outputs = run_paged(
            LONG, kernel=paged_attention, dtype=types[0], kv_dtype=types[1], chunks=1500, window=window
        )
        assert_close_to(naive_attention_of_long(types, window), outputs, types)


LONG = Sequences.random([2060, 1025], 2, 1, 16)


@functools.cache
def naive_attention_of_long(types: tuple[torch.dtype, torch.dtype], window: int) -> list[torch.Tensor]:
    return [naive_attention(LONG.as_cached(*types), index, window=window) for index in range(2)]


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(types=TYPES, window=[0, 70])
def test_bits_do_not_depend_on_chunks_blocks_or_company(
    instruction_set: str, types: tuple[torch.dtype, torch.dtype], window: int
) -> None:
    shape = SHAPES[list(TYPES.values()).index(types)]
    how = {"kernel": paged_attention, "dtype": types[0], "kv_dtype": types[1], "window": window}
    sequences = Sequences.random(LENGTHS, *shape)
    alone = [run_paged(sequences.pick(i), **how)[0] for i in range(len(LENGTHS))]
    settings_to_try = [
        {"chunks": 10_000, "block_size": 4},
        {"chunks": 7, "block_size": 16},
        {"first_chunks": [1, 5, 30, 64, 100], "chunks": [1, 5, 2, 64, 33], "block_size": 128},
        {"first_chunks": [1, 1, 64, 40, 120], "chunks": [1, 1, 64, 1, 3], "block_size": 10},
    ]
    for seed, setting in enumerate(settings_to_try):
        assert_equal_bits(run_paged(sequences, seed=seed, **how, **setting), alone, setting)


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(types=TYPES, shared=[64, 200, 0])
def test_bits_do_not_depend_on_sharing_blocks(
    instruction_set: str, types: tuple[torch.dtype, torch.dtype], shared: int
) -> None:
    """The same prefixes in blocks of their own, in common blocks, and by themselves."""
    sequences = Sequences.random([230, 201, 264, 201, 300], 4, 2, 32, shared=200)
    how = {"kernel": paged_attention, "dtype": types[0], "kv_dtype": types[1]}
    alone = [run_paged(sequences.pick(i), **how)[0] for i in range(5)]
    for first, chunks in ((None, 10_000), ([29, 150, 64, 150, 100], [29, 1, 64, 1, 100]), (None, 66)):
        outputs = run_paged(sequences, shared=shared, first_chunks=first, chunks=chunks, **how)
        assert_equal_bits(outputs, alone, chunks)


@pytest.mark.formats
@pytest.mark.first_case
@pairwise(
    types={name: TYPES[name] for name in ("float32", "bfloat16")},
    chunks={"whole": 3000, "chunked": [1200, 3000, 1]},
)
def test_bits_do_not_depend_on_threads(
    several_threads: None, types: tuple[torch.dtype, torch.dtype], chunks: list[int] | int
) -> None:
    """With few heads and rows, threads share a row's spans."""
    sequences = Sequences.random([2500, 1100, 40], 2, 1, 16)
    how = {"kernel": paged_attention, "dtype": types[0], "chunks": chunks, "window": 2100}
    outputs = run_paged(sequences, **how)
    with threads(1):
        expected = run_paged(sequences, **how)
    assert_equal_bits(outputs, expected, _native.num_threads())


@on_instruction_sets(block_size=[16, 7, 128], window=[0, 50])
def test_key_scores_are_sums_of_weights(instruction_set: str, block_size: int, window: int) -> None:
    check_key_scores(paged_attention, block_size=block_size, window=window)


@on_instruction_sets(window=[0, 50])
def test_key_scores_do_not_depend_on_company_and_chunks(instruction_set: str, window: int) -> None:
    check_bits_of_key_scores(paged_attention, window=window)


def test_key_scores_do_not_depend_on_threads(several_threads: None) -> None:
    check_key_scores(paged_attention, block_size=16, window=0)
    check_bits_of_key_scores(paged_attention)
    batch, cache, query = _random_step([300, 1500], [20, 1], first_scoring_token=[3, 0])
    scores = batch.key_scores
    assert scores is not None
    paged_attention(query, cache.views[0], batch, scale=0.1)
    rows = scores.rows.clone()
    with threads(1):
        paged_attention(query, cache.views[0], batch, scale=0.1)
    assert torch.equal(rows, scores.rows)
    assert rows.sum().item() == pytest.approx(18 * query.shape[1], rel=1e-5)


@on_instruction_sets(sums=[False, True])
def test_key_scores_of_what_is_not_a_number_are_zero(instruction_set: str, sums: bool) -> None:
    for kernels in (paged_attention, ReferenceKernels().paged_attention):
        batch, cache, query = _random_step(
            [70, 90], [2, 3], first_scoring_token=[0, 0], sums_scores=[sums] * 2
        )
        cache.tensor[2, 0, 0, 1, 0] = float("nan")  # a key of the first sequence's second KV head
        scores = batch.key_scores
        assert scores is not None
        kernels(query, cache.views[0], batch, scale=0.1)
        of = scores.sums_of if sums else scores.rows_of
        unit = SCORE_UNIT if sums else 1.0
        assert of(0).double().sum().item() * unit == pytest.approx(2 * 2, rel=1e-4)
        assert of(1).double().sum().item() * unit == pytest.approx(3 * 4, rel=1e-4)


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(chunk=[1, 20])
def test_keys_left_of_every_window_are_never_read(instruction_set: str, chunk: int) -> None:
    sequences = Sequences.random([150, 90], 4, 2, 16)
    how = {"kernel": paged_attention, "chunks": chunk, "window": 30}
    assert_equal_bits(run_paged(sequences, poison_left_of_window=True, **how), run_paged(sequences, **how), 0)


@on_instruction_sets(dtype=[torch.float32, torch.bfloat16])
def test_a_broken_sequence_does_not_touch_its_company(instruction_set: str, dtype: torch.dtype) -> None:
    sequences = Sequences.random([70, 70, 70], 4, 2, 16)
    how = {"kernel": paged_attention, "chunks": [1, 9, 70], "dtype": dtype}
    expected = run_paged(sequences, **how)
    sequences.value[1][3:] = float("nan")
    sequences.key[1][5:] = float("inf")
    outputs = run_paged(sequences, **how)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[2], expected[2])
    assert outputs[1][3:].isnan().all()


@pytest.mark.formats
@pytest.mark.first_case
@on_instruction_sets(types=TYPES, window=[0, 9])
def test_what_is_broken_later_does_not_reach_back(
    instruction_set: str, types: tuple[torch.dtype, torch.dtype], window: int
) -> None:
    """Tokens of a step go through a tile together, those that see the broken one and those that do not."""
    sequences = Sequences.random([150, 40, 1100], 2, 1, 32, shared=16)
    how = {"kernel": paged_attention, "dtype": types[0], "kv_dtype": types[1], "window": window}
    expected = run_paged(sequences, **how)
    for sequence, token in ((0, 99), (1, 30), (2, 1063)):
        sequences.value[sequence][token] = float("nan")
        sequences.key[sequence][token + 2] = float("inf")
    for first, chunks in ((None, 10_000), (None, [100, 31, 1064]), ([90, 20, 1055], 1)):
        outputs = run_paged(sequences, shared=16, first_chunks=first, chunks=chunks, **how)
        for sequence, token in ((0, 99), (1, 30), (2, 1063)):
            assert torch.equal(outputs[sequence][:token], expected[sequence][:token]), (chunks, sequence)
            seeing = outputs[sequence][token : token + window if window else None]
            assert seeing.isnan().all(), (chunks, sequence)


def test_a_span_of_nothing_but_nan_is_not_nothing(instruction_set: str) -> None:
    sequences = Sequences.random([1030], 2, 1, 16)
    sequences.key[0][1024:] = float("nan")
    output = run_paged(sequences, kernel=paged_attention)[0]
    assert not output[:1024].isnan().any()
    assert output[1024:].isnan().all()


def test_large_scores_do_not_overflow(instruction_set: str) -> None:
    sequences = Sequences.random([130], 2, 2, 16)
    sequences.query[0].mul_(1000)
    output = run_paged(sequences, kernel=paged_attention)[0]
    torch.testing.assert_close(output.double(), naive_attention(sequences), atol=2e-3, rtol=0)


def test_other_heads_go_to_the_reference() -> None:
    for head_dim in (24, 592):
        sequences = Sequences.random([70, 3], 4, 2, head_dim)
        expected = run_paged(sequences, kernel=ReferenceKernels().paged_attention)
        assert_equal_bits(run_paged(sequences, kernel=paged_attention), expected, head_dim)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    batch, cache, query = _random_step([20], [4])
    kv = cache.views[0]
    with pytest.raises(ValueError, match="must be adjacent"):
        paged_attention(query.transpose(0, 1).contiguous().transpose(0, 1), kv, batch, scale=1.0)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        paged_attention(query.double(), kv, batch, scale=1.0)
    with pytest.raises(ValueError, match="and contiguous"):
        paged_attention(query, kv, batch, scale=1.0, out=query[:-1])


def test_layers_of_one_window_share_a_plan() -> None:
    batch, cache, query = _random_step([20], [4])
    for window in (0, 8, 0, 8):
        paged_attention(query, cache.views[0], batch, scale=1.0, window=window)
    assert len({plan for plan in batch.plans.values() if isinstance(plan, _native.AttentionPlan)}) == 2


def _random_step(
    lengths: list[int], counts: list[int], **options: Any
) -> tuple[AttentionBatch, PagedAttentionCache, torch.Tensor]:
    """Return a step, a cache of one layer with random content, and queries of 4 heads of 32."""
    needed = [-(-length // 16) for length in lengths]
    cache = make_cache(sum(needed), 1, 2, 16, 32, torch.float32)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    tables = np.zeros((len(lengths), max(needed)), dtype=np.int32)
    ids = iter(range(sum(needed)))
    for row, count in enumerate(needed):
        tables[row, :count] = [next(ids) for _ in range(count)]
    batch = AttentionBatch.build(np.subtract(lengths, counts), np.array(counts), tables, 16, **options)
    query = torch.randn(sum(counts), 4, 32, generator=torch.Generator().manual_seed(2))
    return batch, cache, query
