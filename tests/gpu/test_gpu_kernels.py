"""The kernels on real shapes: numbers as in float32, and bits that do not depend on company."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shapes import LENGTHS, NUM_ROWS, SHAPES, VOCAB_SIZE, Shape

from quire.execution.sampling.rng import uniforms
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.sparse_prefill import KeySelection
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.dispatch import kernel_set
from quire.kernels.layers.experts import ExpertWeights, Mixture
from quire.kernels.layers.gated_linear import GatedLinear
from quire.kernels.layers.weights import Float8Weight, dequantize
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.sampling.selection import Filters, draw
from quire.kernels.sampling.token_choice import RowDraws
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.sampling.token_choice import TritonChoice
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.kv.cache.page_layout import KVLayerSpec

BLOCK_SIZE = 16
NOISE = {"none": 2**-7, "fp8": 0.06, "int8": 0.03, "int4": 0.15}  # of a result, relative to all of its row


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    found = kernel_set("triton")
    assert isinstance(found, TritonKernels)
    return found


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def random(*size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 numbers on the host."""
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, noise: float) -> None:
    """Compare rows: their distance, relative to the expected row's length."""
    distance = (actual.float() - expected.float()).norm(dim=-1)
    assert (distance <= noise * expected.float().norm(dim=-1) + 1e-6).all(), distance.max()


@pytest.mark.parametrize("quantization", NOISE)
def test_dense_layers(kernels: TritonKernels, shape: Shape, quantization: str) -> None:
    weight = random(2 * shape.intermediate, shape.hidden, seed=1, scale=shape.hidden**-0.5)
    layer = kernels.linear([weight], dtype=torch.bfloat16, quantization=quantization)
    rows = random(max(NUM_ROWS), shape.hidden, seed=2).to(kernels.device)
    expected = rows.float() @ weight.to(kernels.device).float().t()
    alone = layer(rows[:1])
    for count in NUM_ROWS:
        result = layer(rows[:count])
        assert_near(result, expected[:count], NOISE[quantization])
        assert torch.equal(result[:1], alone), count


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize("num_inputs", [64, 128, 256, 512])
def test_a_bias_beside_few_inputs(kernels: TritonKernels, num_inputs: int, quantization: str) -> None:
    """All of them are multiplied at once where rows are few, and in several steps where they are many."""
    weight, bias = random(256, num_inputs, seed=1), random(256, seed=2)
    layer = kernels.linear([weight], bias, dtype=torch.bfloat16, quantization=quantization)
    rows = random(300, num_inputs, seed=3).to(kernels.device)
    alone = layer(rows[:1])
    for count in (16, 17, 64, 65, 300):
        assert torch.equal(layer(rows[:count])[:1], alone), count


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_products_that_are_gated(kernels: TritonKernels, shape: Shape, quantization: str) -> None:
    """The bits of two kernels one after the other, for any number of rows."""
    parts = [random(shape.intermediate, shape.hidden, seed=seed).float() for seed in (1, 2)]
    options = {"dtype": torch.bfloat16, "quantization": quantization}
    gated = kernels.gated_linear(kernels.linear(parts, **options), "silu")
    assert not gated.keeps_products
    expected = GatedLinear(kernels, kernels.linear(parts, **options), "silu")
    rows = random(max(NUM_ROWS), shape.hidden, seed=3).to(kernels.device) * 0.1
    alone = gated(rows[:1])
    for count in NUM_ROWS:
        result = gated(rows[:count])
        assert torch.equal(result, expected(rows[:count])), count
        assert torch.equal(result[:1], alone), count


def test_float8_in_blocks(kernels: TritonKernels, shape: Shape) -> None:
    """As checkpoints have it: weights in blocks of 128 x 128, rows in groups of 128."""
    size = shape.intermediate, shape.hidden
    values = random(*size, seed=6, scale=50).to(torch.float8_e4m3fn)  # of a larger one some would be NaN
    scales = random(*(-(-each // 128) for each in size), seed=7).float().abs() / (50 * shape.hidden**0.5)
    weight = Float8Weight(values, scales, (128, 128))
    layer = kernels.linear([weight], dtype=torch.bfloat16)
    rows = random(max(NUM_ROWS), shape.hidden, seed=2).to(kernels.device)
    expected = rows.float() @ dequantize(weight).to(kernels.device).t()
    alone = layer(rows[:1])
    for count in NUM_ROWS:
        result = layer(rows[:count])
        assert_near(result, expected[:count], NOISE["fp8"])
        assert torch.equal(result[:1], alone), count


def test_norms_and_activations(kernels: TritonKernels, shape: Shape) -> None:
    rows = random(max(NUM_ROWS), shape.hidden, seed=3).to(kernels.device)
    weight = random(shape.hidden, seed=4).float().to(kernels.device)
    expected = F.rms_norm(rows.float(), (shape.hidden,), weight, 1e-6)
    assert_near(kernels.rms_norm(rows, weight, eps=1e-6), expected, 2**-8)
    residual = rows.clone()
    added = kernels.add_rms_norm(residual, rows, weight, eps=1e-6)
    assert_near(residual, 2 * rows.float(), 2**-8)
    assert_near(added, F.rms_norm(2 * rows.float(), (shape.hidden,), weight, 1e-6), 2**-7)
    gate_up = random(max(NUM_ROWS), 2 * shape.intermediate, seed=5).to(kernels.device)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert_near(kernels.gated_activation(gate_up, "silu"), F.silu(gate) * up, 2**-7)
    alone = kernels.rms_norm(rows[:1], weight, eps=1e-6)
    for count in NUM_ROWS:
        assert torch.equal(kernels.rms_norm(rows[:count], weight, eps=1e-6)[:1], alone), count


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_attention_over_the_cache(kernels: TritonKernels, shape: Shape, kv_dtype: str) -> None:
    """Prompts but for their last token in one step, and then a decode step."""
    heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_dim)
    lengths = np.array(LENGTHS)
    states = [
        random(length, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=length) for length in LENGTHS
    ]
    together = _attended(kernels, states, lengths, heads, kv_dtype)
    for index, of_sequence in enumerate(states):
        query, key, value = _split(of_sequence, heads)
        if kv_dtype == "bfloat16":
            expected = F.scaled_dot_product_attention(
                *(part.float().transpose(0, 1) for part in (query, key, value)),
                is_causal=True,
                enable_gqa=True,
            ).transpose(0, 1)
            assert_near(together[index].flatten(1), expected.flatten(1), 2**-6)
        alone = _attended(kernels, [of_sequence], lengths[index : index + 1], heads, kv_dtype)[0]
        assert torch.equal(alone, together[index])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_attention_has_the_same_bits_however_a_prompt_is_cut(
    kernels: TritonKernels, shape: Shape, kv_dtype: str, length: int
) -> None:
    """Chunks of one token, of a few and of more have query tiles of other heights, and other instructions."""
    heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_dim)
    lengths = np.array(LENGTHS)
    states = [
        random(length, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=length) for length in LENGTHS
    ]
    last = np.maximum(lengths - 40, 0)
    ends = [last, *(np.minimum(last + end, lengths) for end in range(length, 41, length))]
    together = _attended(kernels, states, lengths, heads, kv_dtype)
    for index, cut in enumerate(_attended(kernels, states, lengths, heads, kv_dtype, ends)):
        assert torch.equal(cut, together[index])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_prompts_that_select_keys(kernels: TritonKernels, shape: Shape, kv_dtype: str) -> None:
    """All are selected: the bits of dense attention; few are: others, but of the first two blocks' tokens.

    A shorter prompt selects the same beside a longer one.
    """
    heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_dim)
    lengths = np.array([2000, 17, 3000]) if max(LENGTHS) > 1000 else np.array([200, 17])
    states = [
        random(length, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=int(length))
        for length in lengths
    ]
    dense = _attended(kernels, states, lengths, heads, kv_dtype)
    for attended, expected in zip(
        _attended(kernels, states, lengths, heads, kv_dtype, threshold=1.1), dense, strict=True
    ):
        assert torch.equal(attended, expected)
    selecting = _attended(kernels, states, lengths, heads, kv_dtype, threshold=0.1)
    [alone] = _attended(kernels, states[:1], lengths[:1], heads, kv_dtype, threshold=0.1)
    assert torch.equal(alone, selecting[0])
    for attended, expected in zip(selecting, dense, strict=True):
        assert torch.equal(attended[:128], expected[:128])
        assert torch.equal(attended, expected) == (len(attended) < 128)
        assert attended.isfinite().all()


def _attended(
    kernels: TritonKernels,
    states: list[torch.Tensor],
    lengths: np.ndarray,
    heads: HeadLayout,
    kv_dtype: str,
    ends: Sequence[np.ndarray] | None = None,
    threshold: float = 0.0,
) -> list[torch.Tensor]:
    """Return what each sequence's tokens attend to, [length, heads, head_dim] on the host.

    Steps compute up to `ends`; without, all but the last token, and then that. With a threshold, keys are
    selected by it.
    """
    needed = -(-lengths // BLOCK_SIZE)
    layer = KVLayerSpec(heads.num_kv_heads, heads.head_dim, heads.head_dim)
    metadata = PagedAttentionCacheMetaData.for_layers(
        [layer], page_size=BLOCK_SIZE, dtype=kv_dtype, num_pages=int(needed.sum())
    )
    cache = PagedAttentionCache.on_device(metadata, kernels.device)
    tables = np.zeros((len(lengths), needed.max()), dtype=np.int32)
    blocks = np.random.default_rng(0).permutation(int(needed.sum()))
    for row, (start, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        tables[row, :count] = blocks[start : start + count]
    parts: list[list[torch.Tensor]] = [[] for _ in lengths]
    for first, end in itertools.pairwise([np.zeros_like(lengths), *(ends or (lengths - 1, lengths))]):
        running = np.flatnonzero(end > first)
        if not len(running):
            continue
        counts = (end - first)[running]
        selection = KeySelection(end[running], threshold, 64, 8) if threshold else None
        batch = AttentionBatch.build(
            first[running], counts, tables[running], BLOCK_SIZE, key_selection=selection
        )
        rows = torch.cat([states[s][first[s] : end[s]] for s in running]).flatten(1).to(kernels.device)
        query = kernels.rotary_and_write_kv(
            rows, cache.views[0], batch, heads=heads, cos=None, sin=None, q_norm=None, k_norm=None, eps=1e-6
        )
        attended = kernels.paged_attention(query, cache.views[0], batch, scale=heads.head_dim**-0.5).cpu()
        for s, part in zip(running, attended.split(counts.tolist()), strict=True):
            parts[s].append(part)
    return [torch.cat(of_sequence) for of_sequence in parts]


def _split(states: torch.Tensor, heads: HeadLayout) -> tuple[torch.Tensor, ...]:
    return states.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)


def test_rotation(kernels: TritonKernels, shape: Shape) -> None:
    heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_dim)
    count = max(NUM_ROWS)
    states = random(count, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=9)
    angles = torch.rand(count, shape.head_dim // 2, generator=torch.Generator().manual_seed(10)) * 6
    layer = KVLayerSpec(heads.num_kv_heads, heads.head_dim, heads.head_dim)
    metadata = PagedAttentionCacheMetaData.for_layers(
        [layer], page_size=BLOCK_SIZE, dtype="bfloat16", num_pages=-(-count // BLOCK_SIZE)
    )
    cache = PagedAttentionCache.on_device(metadata, kernels.device)
    tables = np.arange(-(-count // BLOCK_SIZE))[None]
    batch = AttentionBatch.build(np.zeros(1), np.array([count]), tables, BLOCK_SIZE)
    query = kernels.rotary_and_write_kv(
        states.flatten(1).clone().to(kernels.device), cache.views[0], batch, heads=heads,
        cos=angles.cos().to(kernels.device), sin=angles.sin().to(kernels.device),
        q_norm=None, k_norm=None, eps=1e-6,
    )  # fmt: skip
    as_complex = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        first, second = part.float().chunk(2, dim=-1)
        turned = torch.complex(first, second) * as_complex
        return torch.cat([turned.real, turned.imag], dim=-1).flatten(1)

    expected_query, key, value = _split(states, heads)
    assert_near(query.flatten(1).cpu(), rotated(expected_query), 2**-8)
    pages = cache.views[0]
    for written, expected in ((pages.key_pages, rotated(key)), (pages.value_pages, value.flatten(1))):
        tokens = written.permute(1, 2, 0, 3).flatten(0, 1)[:count].flatten(1)
        assert_near(tokens.cpu(), expected, 2**-8)


@pytest.mark.parametrize("quantization", NOISE)
def test_mixtures_of_experts(kernels: TritonKernels, shape: Shape, quantization: str) -> None:
    if not shape.experts:
        pytest.skip("a dense model")
    mixture = Mixture(shape.experts, shape.experts_per_token, normalize=True, activation="silu")
    gate_up = random(shape.experts, 2 * shape.intermediate, shape.hidden, seed=11, scale=shape.hidden**-0.5)
    down = random(shape.experts, shape.hidden, shape.intermediate, seed=12, scale=shape.intermediate**-0.5)
    weights = [ExpertWeights([up], [low]) for up, low in zip(gate_up, down, strict=True)]
    experts = kernels.experts(
        weights, mixture, dtype=torch.bfloat16, quantization=quantization, group_size=64
    )
    rows = random(max(NUM_ROWS), shape.hidden, seed=13).to(kernels.device)
    scores = random(max(NUM_ROWS), shape.experts, seed=14).to(kernels.device)
    # In bfloat16, scores may be equal: the first experts are chosen.
    ordered = scores.float().softmax(dim=1).sort(dim=1, descending=True, stable=True)
    best, chosen = (part[:, : shape.experts_per_token] for part in ordered)
    best = best / best.sum(dim=1, keepdim=True)
    expected = torch.zeros_like(rows, dtype=torch.float32)
    for expert in range(shape.experts):
        row, place = torch.where(chosen == expert)
        gate, up = (rows[row].float() @ gate_up[expert].to(rows.device).float().t()).chunk(2, dim=1)
        result = (F.silu(gate) * up) @ down[expert].to(rows.device).float().t()
        expected.index_add_(0, row, result * best[row, place].unsqueeze(1))
    alone = experts(rows[:1], scores[:1])
    for count in NUM_ROWS:
        result = experts(rows[:count], scores[:count])
        assert_near(result, expected[:count], 2 * NOISE[quantization])
        assert torch.equal(result[:1], alone), count


def test_choosing_tokens(kernels: TritonKernels) -> None:
    count = 32
    logits = torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(15)) * 4
    numbers = np.arange(count)
    filters = Filters(
        temperature=np.where(numbers % 4, 0.5 + numbers / count, 0.0),
        top_k=np.where(numbers % 3, VOCAB_SIZE, 40),
        top_p=np.where(numbers % 5, 1.0, 0.9),
        min_p=np.where(numbers % 7, 0.0, 0.02),
    )
    seeds, positions = numbers.astype(np.uint64), numbers.astype(np.int64)
    drawn = uniforms(seeds, positions)
    fields = (filters.temperature, filters.top_k, filters.top_p, filters.min_p, drawn)
    draws = RowDraws(*(torch.from_numpy(field).to(kernels.device) for field in fields))
    token_ids, maxima = TritonChoice().choose(logits.to(kernels.device), draws)
    rows = np.flatnonzero(filters.temperature > 0)
    expected = logits.numpy().argmax(axis=1)
    expected[rows] = draw(
        logits.numpy(),
        logits.numpy().max(axis=1)[rows],
        Filters(*(field[rows] for field in fields[:4])),
        drawn[rows],
        rows=rows,
        scans=ReferenceScans(),
    )
    assert token_ids.cpu().tolist() == expected.tolist()
    assert torch.equal(maxima.cpu(), logits.amax(dim=1))
