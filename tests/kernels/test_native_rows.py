"""The native kernels that work row by row: against the reference, and bit for bit in any company."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from native_settings import on_instruction_sets, threads

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels
from quire.kv import KVLayerSpec, PagedAttentionCache, PagedAttentionCacheMetaData

native, reference = NativeKernels(), ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["silu", "gelu_tanh", "gelu", "relu2"]
COUNTS = [*range(1, 18), 31, 69]
# What one rounding to the type and a few in float32 may make of a number, relative to it and at least.
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SMALLEST = 2e-6
POISON = float("nan")


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _view(rows: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with others between the rows."""
    wider = torch.full((rows.shape[0], rows.shape[1] + 13), POISON, dtype=rows.dtype)
    view = wider[:, 5 : 5 + rows.shape[1]]
    return view.copy_(rows)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    dtype = actual.dtype
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[dtype], atol=SMALLEST)


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


@on_instruction_sets(dtype=DTYPES, size=[1, 15, 16, 24, 64, 100, 896, 5000], count=[1, 3, 70])
def test_rms_norm(instruction_set: str, dtype: torch.dtype, size: int, count: int) -> None:
    rows, weight = _random(count, size, dtype=dtype), _random(size, seed=1)
    expected = reference.rms_norm(rows, weight, eps=1e-5)
    _assert_close(native.rms_norm(rows, weight, eps=1e-5), expected)
    out = _view(_poisoned(count, size, dtype=dtype))
    assert native.rms_norm(_view(rows), weight, eps=1e-5, out=out) is out
    _assert_close(out, expected)
    in_place = rows.clone()
    native.rms_norm(in_place, weight, eps=1e-5, out=in_place)
    assert torch.equal(in_place, out)


@on_instruction_sets(dtype=DTYPES, size=[1, 24, 100, 896], count=[1, 70], scale=[1.0, 0.22])
def test_add_rms_norm(instruction_set: str, dtype: torch.dtype, size: int, count: int, scale: float) -> None:
    before, delta = _random(count, size, dtype=dtype), _random(count, size, dtype=dtype, seed=1)
    weight = _random(size, seed=2)
    expected_residual = before.clone()
    expected = reference.add_rms_norm(expected_residual, delta, weight, eps=1e-6, scale=scale)
    residual, out = _view(before), _poisoned(count, size, dtype=dtype)
    assert native.add_rms_norm(residual, _view(delta), weight, eps=1e-6, scale=scale, out=out) is out
    _assert_close(residual, expected_residual)
    _assert_close(out, expected)
    if scale == 1.0:
        assert torch.equal(residual, expected_residual)
    alone = before.clone()
    assert native.add_rms_norm(alone, delta, None, eps=1e-6, scale=scale) is alone
    assert torch.equal(alone, residual)


@on_instruction_sets(dtype=DTYPES, size=[1, 15, 16, 24, 100, 896, 5000], count=[1, 3, 70])
def test_layer_norm(instruction_set: str, dtype: torch.dtype, size: int, count: int) -> None:
    rows, delta = _random(count, size, dtype=dtype) + 2, _random(count, size, dtype=dtype, seed=1)
    weight, bias = _random(size, seed=2), _random(size, seed=3)
    exact = torch.nn.functional.layer_norm(rows.double(), (size,), weight.double(), bias.double(), 1e-5)
    expected = exact.to(dtype)
    out = _view(_poisoned(count, size, dtype=dtype))
    assert native.rms_norm(_view(rows), weight, eps=1e-5, bias=bias, out=out) is out
    tolerance = RELATIVE[dtype] * 4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    found = reference.rms_norm(rows, weight, eps=1e-5, bias=bias)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    summed = rows.clone()
    normed = native.add_rms_norm(summed, delta, weight, eps=1e-5, bias=bias)
    assert torch.equal(normed, native.rms_norm(summed, weight, eps=1e-5, bias=bias))


@on_instruction_sets(activation=ACTIVATIONS, dtype=DTYPES, size=[1, 31, 64, 1000])
def test_activation(instruction_set: str, activation: str, dtype: torch.dtype, size: int) -> None:
    rows = _random(70, size, dtype=dtype) * 4
    gated = torch.cat([rows, torch.ones_like(rows)], dim=1)
    expected = native.gated_activation(gated, activation)
    out = _view(_poisoned(70, size, dtype=dtype))
    assert native.activation(_view(rows), activation, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(native.activation(rows[:1], activation), expected[:1])
    found = reference.activation(rows, activation)
    assert torch.equal(found, reference.gated_activation(gated, activation))
    assert native.activation(rows, activation, out=rows) is rows
    assert torch.equal(rows, expected)


@on_instruction_sets(activation=ACTIVATIONS, dtype=DTYPES, size=[1, 31, 64, 111, 1000])
def test_gated_activation(instruction_set: str, activation: str, dtype: torch.dtype, size: int) -> None:
    rows = _random(70, 2 * size, dtype=dtype) * 4
    expected = reference.gated_activation(rows, activation)
    out = _view(_poisoned(70, size, dtype=dtype))
    assert native.gated_activation(_view(rows), activation, out=out) is out
    gate, up = rows.float().chunk(2, dim=1)
    # Where 1 + erf is close to 0, it may be off by an ulp of 1 in either kernel.
    cancelled = 2**-23 * (gate * up).abs() if activation == "gelu" else 0.0
    error = (out.float() - expected.float()).abs()
    assert out.dtype == expected.dtype
    assert (error <= RELATIVE[dtype] * expected.float().abs() + SMALLEST + cancelled).all()
    assert torch.equal(native.gated_activation(rows[:1], activation), out[:1])


@on_instruction_sets(dtype=DTYPES, size=[1, 31, 64, 200], heads=[1, 3])
def test_gates(instruction_set: str, dtype: torch.dtype, size: int, heads: int) -> None:
    rows, weight = _random(70, heads, size, dtype=dtype), _random(size, seed=1)
    gates = _view(_random(70, 2 * heads * size, dtype=dtype, seed=2) * 4).view(70, heads, 2, size)[:, :, 1]
    normed = reference.rms_norm(rows.float().view(-1, size), weight, eps=1e-5).view(rows.shape)
    sigmoid = torch.sigmoid(gates.double())
    for activation, factor in (("silu", gates.double() * sigmoid), ("sigmoid", sigmoid)):
        found = native.apply_gate(rows.clone(), gates, activation=activation, norm=weight, eps=1e-5)
        _assert_close(found, (normed.double() * factor).to(dtype))
        one = native.apply_gate(rows[1:2].clone(), gates[1:2], activation=activation, norm=weight, eps=1e-5)
        assert torch.equal(one, found[1:2])
    _assert_close(
        native.apply_gate(rows.clone(), gates, activation="sigmoid"), (rows.double() * sigmoid).to(dtype)
    )
    single = _view(_random(70, heads, dtype=dtype, seed=3)).unsqueeze(2)
    expected = (rows.double() * torch.sigmoid(single.double())).to(dtype)
    _assert_close(native.apply_gate(rows.clone(), single, activation="sigmoid"), expected)
    assert native.apply_gate(rows[:0].clone(), gates[:0], activation="sigmoid").shape == (0, heads, size)
    flat = native.apply_gate(rows[:, 0].clone(), single[:, 0], activation="sigmoid")
    _assert_close(flat, expected[:, 0])


@on_instruction_sets(activation=ACTIVATIONS)
def test_activations_over_the_whole_range(instruction_set: str, activation: str) -> None:
    steps = torch.cat(
        [torch.linspace(-12, 12, 20_001), torch.tensor([-1e30, -1e4, -90.0, 0.0, 90.0, 1e4, 1e30])]
    )
    rows = torch.cat([steps, torch.ones_like(steps)])[None]
    wide = steps.double()
    exact = {
        "silu": lambda: wide * torch.sigmoid(wide),
        "gelu": lambda: 0.5 * wide * (1 + torch.erf(wide * 0.5**0.5)),
        "gelu_tanh": lambda: torch.nn.functional.gelu(wide, approximate="tanh"),
        "relu2": lambda: wide.clamp(min=0).square().clamp(max=float("inf")),
    }[activation]()
    actual = native.gated_activation(rows, activation)[0].double()
    exact = exact.where(exact < 1e38, float("inf"))
    assert (
        (actual - exact).abs().nan_to_num(0.0) <= 1e-6 * exact.abs() + 5e-7 * wide.abs().clamp(max=1.0)
    ).all()


def _assert_rows_keep_their_bits(kernel: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    with threads(1):
        expected = kernel(rows.clone())
    for count in COUNTS:
        for start in (0, 1, len(rows) - count):
            part = kernel(rows[start : start + count].clone())
            assert torch.equal(part, expected[start : start + count]), (count, start)
    with threads(2):
        assert torch.equal(kernel(rows.clone()), expected)


@on_instruction_sets(dtype=DTYPES, size=[100, 3584])
def test_rows_keep_their_bits_in_any_company(instruction_set: str, dtype: torch.dtype, size: int) -> None:
    rows, weight = _random(70, size, dtype=dtype), _random(size, seed=1)
    delta = _random(1, size, dtype=dtype, seed=2)
    _assert_rows_keep_their_bits(lambda part: native.rms_norm(part, weight, eps=1e-6), rows)
    _assert_rows_keep_their_bits(
        lambda part: native.add_rms_norm(
            part, delta.expand(part.shape).contiguous(), weight, eps=1e-6, scale=0.3
        ),
        rows,
    )
    bias = _random(size, seed=3)
    _assert_rows_keep_their_bits(lambda part: native.rms_norm(part, weight, eps=1e-6, bias=bias), rows)
    for activation in ACTIVATIONS:
        _assert_rows_keep_their_bits(
            lambda part, activation=activation: native.gated_activation(part, activation), rows
        )


@on_instruction_sets(count=[1, 15, 40_000])
def test_soft_cap(instruction_set: str, count: int) -> None:
    logits = _random(2, count) * 40
    logits[0, 0], logits[1, -1] = float("inf"), -3e38
    found = logits.clone()
    native.soft_cap(found, 30.0)
    torch.testing.assert_close(found.double(), 30 * torch.tanh(logits.double() / 30), rtol=1e-6, atol=3e-5)
    with threads(2):
        native.soft_cap(logits, 30.0)
    assert torch.equal(logits, found)


@on_instruction_sets(dtype=DTYPES, size=[1, 40, 384, 1000], has_shares=[False, True])
def test_sum_rows(instruction_set: str, dtype: torch.dtype, size: int, has_shares: bool) -> None:
    rows = _view(_random(300, size, dtype=dtype) * 100)
    pieces = np.array([[0, 1, 2, 0], [1, 290, 0, 1], [297, 3, 1, 0], [295, 0, 4, 1]])
    shares = np.random.default_rng(0).random(300) if has_shares else None
    sums = _random(5, size).double().div(2**-20).round().mul(2**-20)
    expected = sums.clone()
    reference.sum_rows(rows, pieces, expected, unit=2.0**-26, shares=shares)
    exact = (rows.double() * (1 if shares is None else torch.from_numpy(shares)[:, None]))[1:291].sum(0)
    torch.testing.assert_close(expected[0], exact, rtol=0, atol=290 * 2.0**-27)
    found = sums.clone()
    with threads(2):
        native.sum_rows(rows, pieces, found, unit=2.0**-26, shares=shares)
    assert torch.equal(found, expected)
    in_turns = sums.clone()  # the rows of a piece, the last first
    for first, count, place, begins in pieces.tolist():
        for row in reversed(range(first, first + count)):
            turn = np.array([[row, 1, place, int(begins and row == first + count - 1)]])
            native.sum_rows(rows, turn, in_turns, unit=2.0**-26, shares=shares)
    assert torch.equal(in_turns[:4], expected[:4])


@pytest.mark.parametrize("piece", [(-1, 2, 0, 0), (299, 2, 0, 0), (0, -1, 0, 0), (0, 1, 5, 0), (0, 1, -1, 0)])
def test_pieces_have_rows_and_a_sum(piece: tuple[int, ...]) -> None:
    sums = torch.zeros(5, 8, dtype=torch.float64)
    with pytest.raises(IndexError):
        native.sum_rows(torch.ones(300, 8), np.array([piece]), sums, unit=0.5)
    assert not sums.any()


@on_instruction_sets(dtype=DTYPES, head_dim=[16, 72], half=[0, 5, 8], norm=["", "head", "row"])
def test_rotary(instruction_set: str, dtype: torch.dtype, head_dim: int, half: int, norm: str) -> None:
    rows, angles = _random(40, 3 * head_dim, dtype=dtype), _random(40, half, seed=1)
    cos, sin = (angles.cos(), angles.sin()) if half else (None, None)
    weight = _random(head_dim * (3 if norm == "row" else 1), seed=2) if norm else None
    options = {"head_dim": head_dim, "norm": weight, "eps": 1e-5}
    expected = reference.rotary(rows.clone(), cos=cos, sin=sin, **options)
    found = rows.clone()
    assert native.rotary(found, cos=cos, sin=sin, **options).data_ptr() == found.data_ptr()
    error = (found.view(expected.shape).float() - expected.float()).abs()
    largest = expected.float().abs().amax(-1, keepdim=True)  # differences of products may cancel
    assert (error <= 2 * RELATIVE[dtype] * largest + SMALLEST).all()
    one = (None, None) if cos is None or sin is None else (cos[3:4], sin[3:4])
    alone = native.rotary(rows[3:4].clone(), cos=one[0], sin=one[1], **options)
    assert torch.equal(alone[0].flatten(), found[3])


# -- rotary embedding and the cache -------------------------------------------------------------------------


class Step:
    """A step of some prompts over a poisoned cache, for both kernels."""

    def __init__(
        self,
        heads: HeadLayout,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | str,
        counts: list[int],
        half: int,
        norm: str,
    ) -> None:
        self.heads = heads
        self.dtype, self.cache_dtype = dtype, cache_dtype
        num_tokens = sum(counts)
        tables = np.random.default_rng(3).permutation(len(counts) * 12).reshape(len(counts), 12)
        self.batch = AttentionBatch.build(np.arange(len(counts)) * 3, np.array(counts), tables, 8)
        self.num_blocks = tables.size
        width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        width += heads.num_kv_heads * heads.value_size
        self.qkv = _random(num_tokens, width, dtype=dtype) * 2
        angles = _random(num_tokens, half, seed=1) * 3
        self.cos, self.sin = (angles.cos(), angles.sin()) if half else (None, None)
        sizes = {
            "none": (0, 0),
            "head": (heads.head_dim, heads.head_dim),
            "full": (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim),
        }[norm]
        self.q_norm, self.k_norm = (
            _random(size, seed=seed) if size else None for seed, size in enumerate(sizes, start=4)
        )

    def cache(self) -> KVLayer:
        """Return a layer in which every number and scale is poison."""
        spec = KVLayerSpec(self.heads.num_kv_heads, self.heads.head_dim, self.heads.value_size)
        metadata = PagedAttentionCacheMetaData.for_layers(
            [spec] * 2, page_size=8, dtype=self.cache_dtype, num_pages=self.num_blocks
        )
        kv = PagedAttentionCache.init_cache(None, metadata).views[1]
        for part in (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales):
            if part is not None:
                part.fill_(POISON if part.is_floating_point() else 99)
        return kv

    def run(self, kernels: KernelSet, rows: slice = slice(None)) -> tuple[torch.Tensor, KVLayer]:
        """Return the queries and the cache after the tokens in `rows`, each as a sequence of its own."""
        kv, qkv = self.cache(), _view(self.qkv)[rows]
        positions = self.batch.positions[rows].numpy()
        sequences = np.repeat(np.arange(len(self.batch.num_tokens)), self.batch.num_tokens)[rows]
        batch = AttentionBatch.build(
            positions, np.ones_like(positions), self.batch.block_tables[sequences], 8
        )
        query = kernels.rotary_and_write_kv(
            qkv, kv, batch, heads=self.heads, q_norm=self.q_norm, k_norm=self.k_norm, eps=1e-6,
            cos=None if self.cos is None else self.cos[rows],
            sin=None if self.sin is None else self.sin[rows],
        )  # fmt: skip
        assert query.data_ptr() == qkv.data_ptr()
        return query, kv


def _parts(kv: KVLayer) -> list[torch.Tensor]:
    return [
        part for part in (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales) if part is not None
    ]


LAYOUTS = {
    "6x2x64": HeadLayout(6, 2, 64),
    "4x4x80": HeadLayout(4, 4, 80),
    "3x1x12": HeadLayout(3, 1, 12),
    "8x2x128": HeadLayout(8, 2, 128),
    "keys are values": HeadLayout(5, 1, 80, value_dim=0),
    "shorter values": HeadLayout(6, 2, 64, value_dim=36),
    "longer values": HeadLayout(3, 3, 24, value_dim=48),
}


@on_instruction_sets(
    heads=LAYOUTS,
    dtype=DTYPES,
    norm={"no_norm": "none", "head_norm": "head", "full_norm": "full"},
    turned={"all_turned": "all", "some_turned": "some", "none_turned": "none"},
)
def test_rotary_and_write_kv(
    instruction_set: str, heads: HeadLayout, dtype: torch.dtype, norm: str, turned: str
) -> None:
    half = {"all": heads.head_dim // 2, "some": heads.head_dim // 5, "none": 0}[turned]
    step = Step(heads, dtype, dtype, [1, 17, 5], half, norm)
    query, kv = step.run(native)
    expected_query, expected_kv = step.run(reference)
    # After a norm, numbers differ by a rounding to the type, and the rotation adds two of them.
    tolerance = 3 * RELATIVE[dtype]
    torch.testing.assert_close(query, expected_query, rtol=tolerance, atol=3 * tolerance)
    for part, expected in zip(_parts(kv), _parts(expected_kv), strict=True):
        torch.testing.assert_close(part, expected, rtol=tolerance, atol=3 * tolerance, equal_nan=True)
    if norm == turned == "none":
        assert torch.equal(kv.key_pages.nan_to_num(), expected_kv.key_pages.nan_to_num())
    if heads.value_size:
        assert torch.equal(kv.value_pages.nan_to_num(), expected_kv.value_pages.nan_to_num())


@on_instruction_sets(
    heads=LAYOUTS,
    dtype=DTYPES,
    cache_dtype={
        "int8_cache": torch.int8,
        "int4_cache": "int4",
        "float32_cache": torch.float32,
        "bfloat16_cache": torch.bfloat16,
    },
)
def test_caches_of_other_types_hold_the_same_bits(
    instruction_set: str, heads: HeadLayout, dtype: torch.dtype, cache_dtype: torch.dtype | str
) -> None:
    if cache_dtype == "int4" and (heads.head_dim % 8 or heads.value_size % 8):
        return  # there is no such cache
    step = Step(heads, dtype, cache_dtype, [40, 1], 0, "none")
    step.qkv[3] = 0.0
    # Halves of the unit that a head's int8 numbers have: ties, which go to the even one.
    step.qkv[4] = torch.arange(step.qkv.shape[1]).remainder(255).sub(127).to(dtype) / 2
    _, kv = step.run(native)
    _, expected = step.run(reference)
    for part, expected_part in zip(_parts(kv), _parts(expected), strict=True):
        assert torch.equal(part.float().nan_to_num(), expected_part.float().nan_to_num())


@on_instruction_sets(norm={"no_norm": "none", "head_norm": "head"})
def test_int8_after_rotation_is_within_one_step(instruction_set: str, norm: str) -> None:
    step = Step(LAYOUTS["6x2x64"], torch.float32, torch.int8, [30], 32, norm)
    _, kv = step.run(native)
    _, expected = step.run(reference)
    difference = (kv.key_pages.int() - expected.key_pages.int()).abs()
    assert difference.max() <= 1
    assert (difference != 0).float().mean() < 1e-3
    torch.testing.assert_close(kv.key_scales, expected.key_scales, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(kv.value_pages, expected.value_pages)


@on_instruction_sets(
    cache_dtype={"bfloat16_cache": torch.bfloat16, "int8_cache": torch.int8, "int4_cache": "int4"}
)
def test_tokens_keep_their_bits_in_any_company(instruction_set: str, cache_dtype: torch.dtype | str) -> None:
    step = Step(LAYOUTS["8x2x128"], torch.bfloat16, cache_dtype, [60, 1, 1], 64, "head")
    with threads(1):
        query, kv = step.run(native)
    for row in (0, 1, 33, 61):
        alone, cache = step.run(native, slice(row, row + 1))
        assert torch.equal(alone[0], query[row])
        place = slice(None), step.batch.slot_blocks[row], step.batch.slot_offsets[row]
        for part, expected in zip(_parts(cache), _parts(kv), strict=True):
            assert torch.equal(part[place], expected[place])
    with threads(2):
        again, cache = step.run(native)
    assert torch.equal(again, query)
    for part, expected in zip(_parts(cache)[:2], _parts(kv)[:2], strict=True):
        place = slice(None), step.batch.slot_blocks, step.batch.slot_offsets
        assert torch.equal(part[place], expected[place])


def test_a_tensor_that_changes_its_form_is_checked_again() -> None:
    rows, delta, weight = _random(8, 8), _random(8, 8), _random(8)
    native.add_rms_norm(rows, delta, weight, eps=1e-6, out=rows)
    delta.t_()
    with pytest.raises(ValueError, match="adjacent"):
        native.add_rms_norm(rows, delta, weight, eps=1e-6, out=rows)
    delta.t_().set_(_random(8))
    with pytest.raises(ValueError, match="delta is"):
        native.add_rms_norm(rows, delta, weight, eps=1e-6, out=rows)
    weight.resize_(7)
    with pytest.raises(ValueError, match="norm's weight"):
        native.rms_norm(rows, weight, eps=1e-6, out=rows)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    rows, weight = _random(3, 8), _random(8)
    with pytest.raises(TypeError, match="float64"):
        native.rms_norm(rows.double(), weight, eps=1e-6)
    with pytest.raises(ValueError, match="adjacent"):
        native.rms_norm(_random(8, 3).T, weight, eps=1e-6)
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(rows, weight[:7], eps=1e-6)
    with pytest.raises(ValueError, match="out is"):
        native.rms_norm(rows, weight, eps=1e-6, out=rows[:2])
    with pytest.raises(TypeError, match="bfloat16"):
        native.rms_norm(rows, weight, eps=1e-6, out=rows.bfloat16())
    with pytest.raises(ValueError, match="delta"):
        native.add_rms_norm(rows, rows[:2], weight, eps=1e-6)
    step = Step(LAYOUTS["6x2x64"], torch.float32, torch.float32, [3], 32, "head")
    step.q_norm = _random(63)
    with pytest.raises(ValueError, match="q_norm"):
        step.run(native)
    step = Step(LAYOUTS["6x2x64"], torch.float32, torch.float32, [3], 33, "none")
    with pytest.raises(ValueError, match="cos"):
        step.run(native)
