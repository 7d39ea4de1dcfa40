"""Norms of heads, rotation and the KV write in Triton, beside the reference and in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, DTYPES, RELATIVE, Layer, random, strided

from caches import make_cache
from pairwise import pairwise
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_quantizers import ConvertingQuantizer
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.devices.device import HOST
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.kernel_set import TritonKernels

kernels, reference = TritonKernels(), ReferenceKernels()
LAYOUTS = {
    "4x2x64": HeadLayout(4, 2, 64),
    "2x2x80": HeadLayout(2, 2, 80),
    "3x1x12": HeadLayout(3, 1, 12),
    "keys are values": HeadLayout(5, 1, 80, value_dim=0),
}


class Step:
    """A step of some prompts over a poisoned cache, for both kernels."""

    def __init__(
        self,
        heads: HeadLayout,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        counts: list[int],
        half: int,
        norm: str,
    ) -> None:
        self.heads = heads
        self.cache_dtype = cache_dtype
        num_tokens = sum(counts)
        tables = np.random.default_rng(3).permutation(len(counts) * 4).reshape(len(counts), 4)
        self.batch = AttentionBatch.build(np.arange(len(counts)) * 3, np.array(counts), tables, 8)
        self.num_blocks = tables.size
        width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        width += heads.num_kv_heads * heads.value_size
        self.qkv = random(num_tokens, width, dtype=dtype) * 2
        angles = random(num_tokens, half, seed=1) * 3
        self.cos, self.sin = (angles.cos(), angles.sin()) if half else (None, None)
        sizes = {
            "none": (0, 0),
            "head": (heads.head_dim, heads.head_dim),
            "key": (0, heads.head_dim),
            "full": (heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim),
        }[norm]
        self.q_norm, self.k_norm = (
            random(size, seed=seed) if size else None for seed, size in enumerate(sizes, start=4)
        )
        self.quantizer: ConvertingQuantizer | None = None

    def run(self, chosen: KernelSet, rows: slice = slice(None)) -> tuple[torch.Tensor, Layer]:
        """Return the queries and the cache after the tokens in `rows`, each as a sequence of its own."""
        heads = self.heads
        cache = make_cache(self.num_blocks, 2, heads.num_kv_heads, 8, heads.head_dim, self.cache_dtype)
        # The reference computes on the CPU: torch divides by a number less exactly on a GPU.
        device = DEVICE if chosen is kernels else HOST
        kv, qkv = Layer.poisoned(cache, 1, device), strided(self.qkv)[rows].to(device)
        q_norm, k_norm, cos, sin = (
            None if part is None else part.to(device)
            for part in (self.q_norm, self.k_norm, self.cos, self.sin)
        )
        kv.quantizer = self.quantizer or kv.quantizer
        if not heads.value_size:
            kv.value_pages, kv.value_scales = kv.key_pages, kv.key_scales
        positions = self.batch.positions[rows].numpy()
        sequences = np.repeat(np.arange(len(self.batch.num_tokens)), self.batch.num_tokens)[rows]
        batch = AttentionBatch.build(
            positions, np.ones_like(positions), self.batch.block_tables[sequences], 8
        )
        query = chosen.rotary_and_write_kv(
            qkv, kv, batch, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
            cos=None if cos is None else cos[rows],
            sin=None if sin is None else sin[rows],
        )  # fmt: skip
        assert query.data_ptr() == qkv.data_ptr()
        return query.cpu(), kv.cpu()


@pairwise(
    heads=LAYOUTS,
    dtype=DTYPES,
    norm={"no_norm": "none", "head_norm": "head", "key_norm": "key", "full_norm": "full"},
    turned={"all_turned": "all", "some_turned": "some", "none_turned": "none"},
)
def test_rotary_and_write_kv(heads: HeadLayout, dtype: torch.dtype, norm: str, turned: str) -> None:
    half = {"all": heads.head_dim // 2, "some": heads.head_dim // 5, "none": 0}[turned]
    step = Step(heads, dtype, dtype, [1, 5, 2], half, norm)
    query, kv = step.run(kernels)
    expected_query, expected_kv = step.run(reference)
    # After a norm, numbers differ by a rounding to the type, and the rotation adds two of them.
    tolerance = 3 * RELATIVE[dtype]
    torch.testing.assert_close(query, expected_query, rtol=tolerance, atol=3 * tolerance)
    for part, expected in zip(kv.parts, expected_kv.parts, strict=True):
        torch.testing.assert_close(part, expected, rtol=tolerance, atol=3 * tolerance, equal_nan=True)
    if norm == turned == "none":
        assert torch.equal(kv.key_pages.nan_to_num(), expected_kv.key_pages.nan_to_num())
    if heads.value_size:
        assert torch.equal(kv.value_pages.nan_to_num(), expected_kv.value_pages.nan_to_num())


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
@pairwise(
    heads=LAYOUTS,
    dtype=DTYPES,
    cache_dtype={
        "int8_cache": torch.int8,
        "float8_cache": torch.float8_e4m3fn,
        "float32_cache": torch.float32,
        "bfloat16_cache": torch.bfloat16,
    },
)
def test_caches_of_other_types_hold_the_same_bits(
    heads: HeadLayout, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    step = Step(heads, dtype, cache_dtype, [7, 1], 0, "none")
    step.qkv[3] = 0.0
    # Halves of the unit that a head's int8 numbers have: ties, which go to the even one.
    step.qkv[4] = (torch.arange(step.qkv.shape[1]).remainder(255).sub(127) / 2).to(DEVICE, dtype)
    step.qkv[5] *= 300.0  # some are larger than float8 has
    step.qkv[6, ::3] = float("nan")
    _, kv = step.run(kernels)
    _, expected = step.run(reference)
    for part, expected_part in zip(kv.parts, expected.parts, strict=True):
        assert torch.equal(part.float().nan_to_num(), expected_part.float().nan_to_num())


def test_int8_after_rotation_is_within_one_step() -> None:
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.int8, [9], 32, "head")
    _, kv = step.run(kernels)
    _, expected = step.run(reference)
    difference = (kv.key_pages.int() - expected.key_pages.int()).abs()
    assert difference.max() <= 1
    assert (difference != 0).float().mean() < 1e-3
    torch.testing.assert_close(kv.key_scales, expected.key_scales, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(kv.value_pages, expected.value_pages)


def test_other_quantizers_make_the_pages_themselves() -> None:
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.float32, [3], 32, "head")
    step.quantizer = ConvertingQuantizer(lambda states: states.half().float())
    _, kv = step.run(kernels)
    _, expected = step.run(reference)
    assert torch.equal(kv.value_pages.nan_to_num(), expected.value_pages.nan_to_num())
    torch.testing.assert_close(kv.key_pages, expected.key_pages, rtol=2**-10, atol=1e-6, equal_nan=True)


@pairwise(
    cache_dtype={
        "bfloat16_cache": torch.bfloat16,
        "int8_cache": torch.int8,
        "float8_cache": torch.float8_e4m3fn,
    }
)
def test_tokens_keep_their_bits_in_any_company(cache_dtype: torch.dtype) -> None:
    step = Step(LAYOUTS["4x2x64"], torch.bfloat16, cache_dtype, [6, 1, 1], 32, "head")
    query, kv = step.run(kernels)
    for row in (0, 5, 7):
        alone, cache = step.run(kernels, slice(row, row + 1))
        assert torch.equal(alone[0], query[row])
        place = slice(None), step.batch.slot_blocks[row], step.batch.slot_offsets[row]
        for part, expected in zip(cache.parts, kv.parts, strict=True):
            assert torch.equal(part[place], expected[place])


def test_what_the_kernel_cannot_take_is_refused() -> None:
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.float32, [3], 32, "head")
    step.q_norm = random(63)
    with pytest.raises(ValueError, match="norm"):
        step.run(kernels)
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.float32, [3], 33, "none")
    with pytest.raises(ValueError, match="cos"):
        step.run(kernels)
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.float32, [3], 32, "none")
    step.sin = None
    with pytest.raises(ValueError, match="missing"):
        step.run(kernels)
    step = Step(LAYOUTS["4x2x64"], torch.float32, torch.float32, [3], 32, "none")
    step.qkv = step.qkv[:, 1:]
    with pytest.raises(ValueError, match="qkv is"):
        step.run(kernels)


@pytest.mark.parametrize("name", ["slot_blocks", "slot_offsets"])
def test_places_beyond_the_cache_are_refused(name: str) -> None:
    heads = LAYOUTS["4x2x64"]
    kv = Layer.poisoned(make_cache(4, 2, 2, 8, 64, torch.float32), 1)
    for wrong, error in (([0, -1], IndexError), ([0, 8], IndexError), ([0], ValueError)):
        batch = AttentionBatch.build(np.array([0]), np.array([2]), np.array([[0]]), 8)
        setattr(batch, name, torch.tensor(wrong))
        with pytest.raises(error, match=name):
            kernels.rotary_and_write_kv(
                random(2, 8 * 64),
                kv,
                batch,
                heads=heads,
                cos=None,
                sin=None,
                q_norm=None,
                k_norm=None,
                eps=1e-6,
            )
