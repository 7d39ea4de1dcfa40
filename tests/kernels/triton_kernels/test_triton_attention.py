"""Paged attention in Triton's interpreter: against float64 attention, and its bits against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_harness import Sequences, naive_attention, naive_weights_and_values, run_paged
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_inputs import DEVICE, Layer

from pairwise import pairwise
from quire.errors import ConfigError
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.key_scores import KeyScores
from quire.kernels.attention.kv_quantizers import Int8PageQuantizer
from quire.kernels.attention.sparse_prefill import KeySelection, SkippedKeys
from quire.kernels.bounds import SCORE_UNIT
from quire.kernels.devices.device import HOST
from quire.kernels.reference import ReferenceKernels, write_kv
from quire.kernels.size_classes import SizeClasses, coarse_size_class
from quire.kernels.triton.attention import items as attention_items
from quire.kernels.triton.attention import plan as attention_plan
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kv import PagedAttentionCacheMetaData, PagedAttentionCacheView
from unmutated import UNMUTATED

SHAPES = [(3, 1, 24), (2, 2, 64), (8, 1, 80), (2, 1, 128)]  # heads, KV heads, head size
TYPES = {  # of the query and of the cache
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32_over_int8": (torch.float32, torch.int8),
    "bfloat16_over_int8": (torch.bfloat16, torch.int8),
    "float16_over_int8": (torch.float16, torch.int8),
    "bfloat16_over_float32": (torch.bfloat16, torch.float32),
}
# Absolute and relative: weights and results are rounded to the query's type.
TOLERANCES = {torch.float32: (2e-6, 0.0), torch.bfloat16: (2**-7, 2**-7), torch.float16: (2**-10, 2**-10)}
NEVER, ALWAYS = 1, 1 << 40  # programs that are wanted: a query tile's keys are divided never or always


@pytest.fixture
def tall_float32_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut float32 rows as others are, so that results show every bit."""
    monkeypatch.setattr(attention_plan, "MAX_FLOAT32_ROWS", attention_plan.ROW_CLASSES[-1])


@pytest.fixture(params=[NEVER, ALWAYS], ids=["whole", "divided"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_items, "PROGRAMS", request.param)


def halves(lengths: list[int], *shape: int, **options: Any) -> Sequences:
    """Return sequences whose products are exact in float64, in whatever order the interpreter adds them."""
    sequences = Sequences.random(lengths, *shape, **options)
    for part in (sequences.query, sequences.key, sequences.value):
        part[:] = [states.half().float() for states in part]
    return sequences


def paged_attention(
    query: torch.Tensor,
    kv: Any,
    batch: AttentionBatch,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend where the kernels run, with what is on the CPU."""
    scores = batch.key_scores
    if scores is not None and scores.layer_rows.device == HOST:
        scores.layer_rows, scores.layer_sums = scores.layer_rows.to(DEVICE), scores.layer_sums.to(DEVICE)
    parts = (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales)
    layer = Layer(*(None if part is None else part.to(DEVICE) for part in parts), kv.quantizer)
    attended = TritonKernels().paged_attention(
        torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device=DEVICE).copy_(query),
        layer,
        batch,
        sinks=None if sinks is None else sinks.to(DEVICE),
        out=None if out is None else out.to(DEVICE),
        **options,
    )
    if scores is not None:
        scores.layer_rows, scores.layer_sums = scores.layer_rows.cpu(), scores.layer_sums.cpu()
    return attended.cpu() if out is None else out.copy_(attended)


def after_prompts(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
    """Attend as the kernel does, but not in the first step: its result is left out, which is much faster."""
    if not batch.num_cached_tokens.any():
        attended: torch.Tensor = options["out"]
        return attended
    return paged_attention(query, kv, batch, **options)


def assert_close(
    outputs: list[torch.Tensor], sequences: Sequences, types: tuple[torch.dtype, ...], **options: Any
) -> None:
    atol, rtol = TOLERANCES[types[0]]
    cached = sequences.as_cached(*types)
    for index, output in enumerate(outputs):
        expected = naive_attention(cached, index, **options)[-len(output) :]
        torch.testing.assert_close(output.double(), expected, atol=atol, rtol=rtol)


@settings(max_examples=6, derandomize=True, deadline=None, backend=UNMUTATED)
@given(
    shape=st.sampled_from([(3, 1, 24), (2, 2, 16), (5, 1, 32)]),
    types=st.sampled_from(list(TYPES.values())),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=2),
    chunk=st.sampled_from([30, 10_000]),
    block_size=st.sampled_from([1, 7, 8, 32, 128]),
    window=st.sampled_from([0, 0, 1, 33, 64]),
    softcap=st.sampled_from([0.0, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_textbook_attention(
    shape: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype],
    lengths: list[int],
    chunk: int,
    block_size: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    seed: int,
) -> None:
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
    assert_close(outputs, sequences, types, **options)


@pairwise(shape=SHAPES, types=TYPES, block_size=[8, 16, 32])
def test_every_shape_and_type(
    shape: tuple[int, int, int], types: tuple[torch.dtype, torch.dtype], block_size: int
) -> None:
    sequences = Sequences.random([70, 3], *shape)
    outputs = run_paged(
        sequences,
        kernel=after_prompts,
        dtype=types[0],
        kv_dtype=types[1],
        first_chunks=[60, 2],
        block_size=block_size,
    )
    assert_close([output[start:] for output, start in zip(outputs, (60, 2), strict=True)], sequences, types)


@pairwise(dtype=[torch.bfloat16, torch.float16], stored=[torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_pages(dtype: torch.dtype, stored: torch.dtype) -> None:
    metadata = PagedAttentionCacheMetaData.create(None, _axis(), 1, 1, 64, 16, 1, 32, 0.5, dtype)
    kv = PagedAttentionCacheView.init(
        None, metadata.replace(num_pages_per_layer=4), 0, lambda states: states.to(stored)
    )
    assert kv.key_pages.dtype == stored
    sequences = Sequences.random([40], 2, 1, 32)
    batch = AttentionBatch.build(np.array([0]), np.array([40]), np.array([[2, 0, 3]]), 16)
    write_kv(sequences.key[0].to(dtype), sequences.value[0].to(dtype), kv, batch)
    output = paged_attention(sequences.query[0].to(dtype), kv, batch, scale=32**-0.5)
    rounded = Sequences(
        [sequences.query[0].to(dtype)],
        *([part[0].to(dtype).to(stored).double()] for part in (sequences.key, sequences.value)),
    )
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(output.double(), naive_attention(rounded), atol=atol, rtol=rtol)


@pairwise(window=[0, 100], softcap=[0.0, 1.5], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("programs")
def test_long_sequences(window: int, softcap: float, dtype: torch.dtype) -> None:
    sequences = Sequences.random([700, 258, 2], 3, 1, 32)
    options = {"window": window, "softcap": softcap, "sinks": torch.tensor([-1.0, 0.0, 9.0])}
    outputs = run_paged(
        sequences, kernel=after_prompts, dtype=dtype, first_chunks=[699, 255, 1], chunks=3, **options
    )
    tails = [output[start:] for output, start in zip(outputs, (699, 255, 1), strict=True)]
    assert_close(tails, sequences, (dtype, dtype), **options)


@pytest.mark.parametrize(
    ("shape", "window"), [((3, 1, 24), 0), ((2, 1, 64), 70)], ids=["group3", "windowed_group2"]
)
@pytest.mark.usefixtures("tall_float32_tiles")
def test_bits_do_not_depend_on_chunks_blocks_or_company(shape: tuple[int, int, int], window: int) -> None:
    sequences, first = halves([70, 290], *shape), [30, 250]

    def tails(which: Sequences, first: list[int], **how: Any) -> list[torch.Tensor]:
        outputs = run_paged(which, kernel=after_prompts, window=window, first_chunks=first, **how)
        return [output[start:] for output, start in zip(outputs, first, strict=True)]

    alone = [tails(sequences.pick(i), first[i : i + 1])[0] for i in range(2)]
    for number, rows in enumerate(attention_plan.ROW_CLASSES):  # `alone` had the last ones
        chunk = rows // shape[0]
        outputs = tails(sequences, first, chunks=chunk, block_size=8 << number, seed=number)
        assert all(torch.equal(*pair) for pair in zip(outputs, alone, strict=True)), chunk


@pytest.mark.usefixtures("tall_float32_tiles")
def test_bits_do_not_depend_on_who_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = halves([530, 600], 3, 1, 24)
    how = {"kernel": after_prompts, "first_chunks": [520, 599], "sinks": torch.tensor([-1.0, 0.0, 2.0])}
    divisions = []
    results = []

    def noting(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        attended = after_prompts(query, kv, batch, **options)
        plans = [plan for plan in batch.plans.values() if isinstance(plan, attention_plan.AttentionPlan)]
        divisions.extend(tuple(len(tiles.merges) for tiles in plan.classes) for plan in plans)
        return attended

    for programs, part_bytes in ((NEVER, 1 << 28), (ALWAYS, 1 << 28), (ALWAYS, 0)):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        monkeypatch.setattr(attention_items, "MAX_PART_BYTES", part_bytes)
        outputs = run_paged(sequences, **how | {"kernel": noting})
        results.append([output[start:] for output, start in zip(outputs, (520, 599), strict=True)])
    assert divisions == [(0, 0), (1, 1), (0, 0)]
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


def test_what_is_added_to_a_plan_does_nothing_and_its_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = halves([530, 600], 3, 1, 24)
    how = {"first_chunks": [520, 599], "sinks": torch.tensor([-1.0, 0.0, 2.0])}
    expected = run_paged(sequences, **how, kernel=after_prompts)
    part_bytes = 16 * (32 + 2) * 4  # of one head and a tile of 16 rows, in float32
    monkeypatch.setattr(attention_items, "PROGRAMS", ALWAYS)
    monkeypatch.setattr(attention_items, "MAX_PART_BYTES", 8 * part_bytes)
    planned: list[tuple[int, ...]] = []

    def coarse(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        if not batch.num_cached_tokens.any():
            return after_prompts(query, kv, batch, **options)
        padded = batch.padded(SizeClasses(lambda count: count + 3, coarse_size_class, coarse_size_class))
        rows = torch.cat([query, query.new_zeros(3, *query.shape[1:])])
        attended = paged_attention(rows, kv, padded, **options | {"out": None})
        (plan,) = padded.plans.values()
        planned.extend((len(one.items), len(one.merges), len(one.part_sums)) for one in plan.classes)
        assert not attended[batch.num_rows :].any()
        result: torch.Tensor = options["out"]
        return result.copy_(attended[: batch.num_rows])

    outputs = run_paged(sequences, **how, kernel=coarse)
    assert all(
        torch.equal(output[start:], before[start:])
        for output, before, start in zip(outputs, expected, (520, 599), strict=True)
    )
    assert planned == [(16, 16, 8)]


@pytest.mark.usefixtures("tall_float32_tiles")
def test_prefixes_may_be_shared() -> None:
    sequences = halves([80, 70], 2, 1, 32, shared=64)
    expected = [run_paged(sequences.pick(i), kernel=paged_attention)[0] for i in range(2)]
    how = {"kernel": after_prompts, "first_chunks": [66, 65], "shared": 64}
    outputs = run_paged(sequences, **how)
    assert torch.equal(outputs[0][66:], expected[0][66:])
    assert torch.equal(outputs[1][65:], expected[1][65:])


def test_keys_left_of_every_window_are_never_read() -> None:
    how = {"kernel": paged_attention, "chunks": 30, "window": 20}
    sequences = Sequences.random([90, 70], 1, 1, 16)
    expected = run_paged(sequences, **how)
    poisoned = run_paged(sequences, **how, poison_left_of_window=True)
    assert all(torch.equal(*pair) for pair in zip(poisoned, expected, strict=True))


def test_a_broken_sequence_does_not_touch_its_company() -> None:
    sequences = Sequences.random([20, 20, 20], 2, 1, 16)
    how = {"kernel": paged_attention, "chunks": [1000, 9, 1000]}
    expected = run_paged(sequences, **how)
    sequences.value[1][3:] = float("nan")
    sequences.key[1][5:] = float("inf")
    outputs = run_paged(sequences, **how)
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[2], expected[2])
    assert outputs[1][3:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    sequences = Sequences.random([130], 2, 2, 16)
    sequences.query[0].mul_(1000)
    output = run_paged(sequences, kernel=after_prompts, first_chunks=[120])[0]
    torch.testing.assert_close(output[120:].double(), naive_attention(sequences)[120:], atol=2e-3, rtol=0)


def test_evicted_tokens_are_not_seen() -> None:
    """Attention counts places, not positions."""
    kv, query = _layer_and_query(43)
    table, counts = np.arange(4)[None], np.array([3])
    short = AttentionBatch.build(np.array([15]), counts, table, 16)
    evicted = AttentionBatch.build(np.array([40]), counts, table, 16, num_evicted_tokens=np.array([25]))
    outputs = [paged_attention(query[40:], kv, batch, scale=1.0, window=9) for batch in (short, evicted)]
    assert torch.equal(*outputs)


def test_a_step_is_planned_once_for_layers_of_one_shape() -> None:
    kv, query = _layer_and_query(40)
    batch = AttentionBatch.build(np.array([30, 0]), np.array([1, 39]), np.arange(8).reshape(2, 4), 16)
    paged_attention(query, kv, batch, scale=1.0)
    plans = dict(batch.plans)
    paged_attention(query, kv, batch, scale=1.0)
    assert all(batch.plans[name] is plan for name, plan in plans.items())
    assert len(batch.plans) == len(plans)
    paged_attention(query, kv, batch, scale=1.0, window=8)
    assert len(batch.plans) == len(plans) + 1


def test_a_step_may_be_empty() -> None:
    kv, query = _layer_and_query(1)
    none = np.array([], dtype=np.int64)
    batch = AttentionBatch.build(none, none, np.zeros((0, 4)), 16)
    assert paged_attention(query[:0], kv, batch, scale=1.0).shape == (0, 2, 16)


def test_quantizers_that_only_python_knows_are_refused() -> None:
    class Halving:
        def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return states / 2, None

        def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            return numbers * 2

    kv, query = _layer_and_query(1, Halving())
    batch = AttentionBatch.build(np.array([0]), np.array([1]), np.array([[0]]), 16)
    with pytest.raises(ConfigError, match=r"Halving.*set EngineConfig.kernels to 'reference'"):
        paged_attention(query, kv, batch, scale=1.0)
    kv, _ = _layer_and_query(1, lambda states: states.to(torch.int16))
    with pytest.raises(ConfigError, match=r"keys are torch.int16.*EngineConfig.kernels"):
        paged_attention(query, kv, batch, scale=1.0)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query": torch.zeros(2, 2, 16)}, ValueError, r"must be \[1, a multiple of 1, 16\]"),
        ({"query": torch.zeros(1, 2, 8)}, ValueError, r"must be \[1, a multiple of 1, 16\]"),
        ({"query": torch.zeros(1, 2, 32)[..., ::2]}, ValueError, "features adjacent"),
        ({"query": torch.zeros(1, 2, 16).double()}, TypeError, "query is torch.float64"),
        ({"sinks": torch.zeros(3)}, ValueError, r"must be float32 \[2\]"),
        ({"distance_bias": torch.zeros(2, 3)}, ValueError, "a batch that is not two-sided"),
        ({"out": torch.zeros(1, 2, 16).half()}, ValueError, "out is torch.float16"),
        ({"block_size": 8}, ValueError, "blocks of 16 tokens, and the batch of 8"),
        ({"table": [8]}, IndexError, "names block 8; the cache has 8 blocks"),
        ({"table": [-1]}, IndexError, "names block 4294967295"),
        ({"cached": 20}, IndexError, "fills 2 blocks; the step's tables have room for 1"),
    ],
    ids=[
        "tokens",
        "head_dim",
        "strides",
        "type",
        "sinks",
        "distance_bias",
        "out",
        "block_size",
        "block",
        "negative",
        "length",
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    kv, query = _layer_and_query(1)
    arguments = {"query": query, "block_size": 16, "table": [7], "cached": 0} | wrong
    block_size, table, cached = (arguments.pop(name) for name in ("block_size", "table", "cached"))
    batch = AttentionBatch.build(np.array([0]), np.array([1]), np.array([table]), block_size)
    batch.num_cached_tokens[:] = cached
    with pytest.raises(error, match=message):
        paged_attention(kv=kv, batch=batch, scale=1.0, **arguments)


@pytest.mark.parametrize("has_scales", [False, True])
def test_values_lie_as_keys_do(has_scales: bool) -> None:
    pages = torch.zeros(1, 8, 16, 16, dtype=torch.int8 if has_scales else torch.float32, device=DEVICE)
    scales = torch.zeros(1, 8, 16, device=DEVICE)
    quantizer = Int8PageQuantizer() if has_scales else None
    query = torch.zeros(1, 2, 16, device=DEVICE)
    batch = AttentionBatch.build(np.array([0]), np.array([1]), np.array([[7]]), 16)
    if has_scales:
        wider = torch.zeros(1, 8, 20, device=DEVICE)[:, :, :16]
        kv = Layer(pages, pages.clone(), scales, wider, quantizer)
        message = (
            r"scales of values have strides \(160, 20, 1\); they must be those of the keys', \(128, 16, 1\)"
        )
    else:
        kv = Layer(pages, torch.zeros(1, 8, 16, 20, device=DEVICE)[..., :16], None, None, quantizer)
        message = (
            r"values are \[1, 8, 16, 16\] with strides \(2560, 320, 20, 1\); they must be .* as the keys"
        )
    with pytest.raises(ValueError, match=message):
        paged_attention(query, kv, batch, scale=1.0)


@pairwise(sums=[False, True], window=[0, 50])
def test_key_scores_are_sums_of_weights(sums: bool, window: int) -> None:
    sequences = Sequences.random([150, 75], 3, 1, 24)
    options = {"window": window, "softcap": 3.0, "sinks": torch.linspace(-1, 2, 3)}
    scores = _scored(sequences, first_chunks=[140, 70], first_scoring=[7, 0], sums=sums, **options)
    for index, first in enumerate((147, 70)):
        expected = naive_weights_and_values(sequences, index, **options, first=first)[0].sum(0)
        if sums:
            actual, expected = scores.sums_of(index)[0].double() * SCORE_UNIT, expected.sum(0)
        else:
            actual = scores.rows_of(index)[0].double()
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_key_scores_are_where_the_kernels_are() -> None:
    kv, query = _layer_and_query(1)
    batch = AttentionBatch.build([0], [1], [[7]], 16, first_scoring_token=[0], scores_on=torch.device("meta"))
    with pytest.raises(ValueError, match=f"key scores are on meta, and the query on {DEVICE.type}"):
        paged_attention(query, kv, batch, scale=1.0)


def test_key_scores_of_layers_are_kept_apart() -> None:
    kv, query = _layer_and_query(1)
    batch = AttentionBatch.build([2], [1], [[7]], 16, first_scoring_token=[0], num_scored_layers=3)
    scores = batch.key_scores
    for layer in (2, 0, 1):
        scores.layer = layer
        paged_attention(query * layer, kv, batch, scale=1.0)
    rows = scores.rows_of(0)[:, 0]
    assert torch.allclose(rows[0], torch.tensor(2 / 3))  # two heads, and no preference
    for layer in (1, 2):
        weights = (layer * query[0] @ kv.key_pages[0, 7, :3].T).softmax(-1).sum(0)
        assert torch.allclose(rows[layer], weights, atol=1e-5)


@pytest.mark.usefixtures("tall_float32_tiles")
def test_bits_of_key_scores_do_not_depend_on_company_and_chunks() -> None:
    sequences = halves([100, 150], 3, 1, 24)
    together = [
        _scored(sequences, first_chunks=[88, 130], first_scoring=[0, 0], sums=sums) for sums in (False, True)
    ]
    for index, first in enumerate((88, 130)):
        rows, sums = together[0].rows_of(index)[0], together[1].sums_of(index)[0]
        total = torch.zeros_like(sums)
        length = sequences.lengths[index]
        for start, end in ((first, first + 4), (first + 4, length)):
            alone = Sequences(*([part[index][:end]] for part in _parts(sequences)))
            part = _scored(alone, first_chunks=[start], first_scoring=[0], sums=True)
            total[:end] += part.sums_of(0)[0]
            part = _scored(alone, first_chunks=[start], first_scoring=[0], sums=False)
            assert torch.equal(part.rows_of(0)[0], rows[start - first : end - first, :end])
        assert torch.equal(total, sums)


@pytest.mark.usefixtures("programs")
def test_skipped_keys_are_left_out() -> None:
    lengths, first, gaps = [110, 700, 700, 260], [80, 690, 699, 250], [(16, 64), (70, 680), (64, 640), (0, 0)]
    sequences = Sequences.random(lengths, 2, 1, 16)

    def skipping(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        chosen = np.array(gaps) * (done[:, None] > 0)
        return {"skipped_keys": SkippedKeys(chosen[:, 0].copy(), chosen[:, 1].copy())}

    outputs = run_paged(
        sequences, kernel=after_prompts, dtype=torch.float16, first_chunks=first, sparse=skipping
    )
    for index, (start, gap) in enumerate(zip(first, gaps, strict=True)):
        seen = [*range(gap[0]), *range(gap[1], lengths[index])]
        parts = (part[index] for part in _parts(sequences.as_cached(torch.float16, torch.float16)))
        query, key, value = (part.double() for part in parts)
        hidden = torch.arange(lengths[index])[seen] > torch.arange(start, lengths[index])[:, None]
        scores = torch.einsum("qhd,kd->hqk", query[start:], key[seen, 0]) / 4
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,kd->qhd", weights, value[seen, 0])
        torch.testing.assert_close(outputs[index][start:].double(), expected, atol=2**-10, rtol=2**-10)


def test_selected_keys_are_those_of_the_reference() -> None:
    """Which ones that are is tested there; the scores of keys leave the others out, too."""
    sequences = Sequences.random([420, 90], 3, 1, 16)
    sequences.query[0] += 0.4
    for block in range(0, 420, 64):  # some matter more than others
        sequences.key[0][block : block + 64] += block % 192 / 192
    first, selected = [330, 80], KeySelection(np.array([420, 0]), 0.7, 64, 8)

    def selecting(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        return {"key_selection": selected if done.any() else None, "first_scoring_token": counts - 9}

    results = []
    for kernel in (paged_attention, ReferenceKernels().paged_attention):
        captured = []

        def noting(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
            if not batch.num_cached_tokens.any():
                return after_prompts(query, kv, batch, **options)
            captured.append(batch.key_scores)  # noqa: B023
            return kernel(query, kv, batch, **options)  # noqa: B023

        outputs = run_paged(
            sequences, kernel=noting, dtype=torch.float16, first_chunks=first, sparse=selecting
        )
        tails = [output[start:] for output, start in zip(outputs, first, strict=True)]
        results.append([*tails, *(scores.rows.half() for scores in captured)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2**-9, rtol=2**-9)
    dense = run_paged(sequences, dtype=torch.float16)[0][first[0] :]
    assert (results[0][0] - dense).abs().max() > 0.1


def _scored(
    sequences: Sequences, *, first_chunks: list[int], first_scoring: list[int], sums: bool, **options: Any
) -> KeyScores:
    """Return the key scores of the step after the first one."""
    captured = []

    def noting(query: torch.Tensor, kv: Any, batch: AttentionBatch, **options: Any) -> torch.Tensor:
        batch.key_scores.rows.fill_(float("nan"))
        batch.key_scores.sums.fill_(-1)
        attended = after_prompts(query, kv, batch, **options)
        captured.append(batch.key_scores)
        return attended

    def scoring(running: Any, done: Any, counts: Any) -> dict[str, Any]:
        return {"first_scoring_token": np.array(first_scoring), "sums_scores": np.full(len(counts), sums)}

    run_paged(sequences, kernel=noting, first_chunks=first_chunks, sparse=scoring, **options)
    assert len(captured) == 2
    return captured[1]


def _parts(sequences: Sequences) -> tuple[list[torch.Tensor], ...]:
    return sequences.query, sequences.key, sequences.value


def _axis() -> Any:
    from quire.kv import PartitionAxis

    return PartitionAxis()


def _layer_and_query(length: int, quantizer: Any = None) -> tuple[Any, torch.Tensor]:
    metadata = PagedAttentionCacheMetaData.create(None, _axis(), 1, 1, 64, 16, 1, 16, 0.5, torch.float32)
    kv = PagedAttentionCacheView.init(None, metadata.replace(num_pages_per_layer=8), 0, quantizer)
    if quantizer is None:
        kv.key_pages.copy_(torch.randn(kv.key_pages.shape, generator=torch.Generator().manual_seed(0)))
        kv.value_pages.copy_(torch.randn(kv.key_pages.shape, generator=torch.Generator().manual_seed(1)))
    return kv, torch.randn(length, 2, 16, generator=torch.Generator().manual_seed(2))
