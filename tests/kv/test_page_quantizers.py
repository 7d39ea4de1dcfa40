"""Caches whose numbers a quantizer makes: what they hold, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.dispatch import kernel_set
from quire.kernels.reference import ReferenceKernels, write_kv
from quire.kv import (
    Float8PageQuantizer,
    Int4PageQuantizer,
    Int8PageQuantizer,
    KVLayerSpec,
    PagedAttentionCache,
    PagedAttentionCacheMetaData,
)

HEADS = HeadLayout(4, 2, 16)
LENGTH, PAGE = 90, 8


class Affine:
    """uint8 with the least value and the step of each vector, two numbers to a byte more than int8."""

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = states.float().amin(-1), states.float().amax(-1)
        step = (high - low).clamp_min(1e-9) / 255
        numbers = ((states.float() - low[..., None]) / step[..., None]).round().to(torch.uint8)
        return numbers, torch.stack([low, step], -1)

    def dequantize(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return numbers.float() * scales[..., 1:] + scales[..., :1]


class Packed:
    """A head's features in half as many numbers; nothing beside them."""

    def quantize(self, states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return states[..., ::2].to(torch.bfloat16), None

    def dequantize(self, numbers: torch.Tensor, scales: None) -> torch.Tensor:
        return numbers.repeat_interleave(2, -1)


def make(dtype: str = "float32", quantizer: object | None = None) -> PagedAttentionCache:
    spec = KVLayerSpec(HEADS.num_kv_heads, HEADS.head_dim, HEADS.head_dim)
    metadata = PagedAttentionCacheMetaData.for_layers([spec] * 2, page_size=PAGE, dtype=dtype, num_pages=15)
    return PagedAttentionCache.init_cache(None, metadata, quantizer)


def to_float16(states: torch.Tensor) -> torch.Tensor:
    return states.to(torch.float16)


def as_read(states: torch.Tensor, quantizer: object) -> torch.Tensor:
    if quantizer is to_float16:
        return to_float16(states).float()
    return quantizer.dequantize(*quantizer.quantize(states)).float()


QUANTIZERS = {
    "int8": Int8PageQuantizer(),
    "int4": Int4PageQuantizer(),
    "float8": Float8PageQuantizer(),
    "affine": Affine(),
    "packed": Packed(),
    "function": to_float16,
}


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_attention_reads_what_the_quantizer_makes(name: str, kernels: str):
    quantizer = QUANTIZERS[name]
    view = make(quantizer=quantizer).views[1]
    tables = np.random.default_rng(0).permutation(15)[None, : -(-LENGTH // PAGE)]
    batch = AttentionBatch.build(np.array([0]), np.array([LENGTH]), tables, PAGE)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(LENGTH, 8 * 16, generator=generator)
    key, value = (qkv[:, i : i + 32].view(LENGTH, 2, 16).clone() for i in (64, 96))
    options = {"cos": None, "sin": None, "q_norm": None, "k_norm": None, "eps": 1e-6}
    kernel = kernel_set(kernels)
    query = kernel.rotary_and_write_kv(qkv, view, batch, heads=HEADS, **options)
    attended = kernel.paged_attention(query, view, batch, scale=0.25)
    plain = make().views[0]
    write_kv(as_read(key, quantizer), as_read(value, quantizer), plain, batch)
    expected = ReferenceKernels().paged_attention(query, plain, batch, scale=0.25)
    if kernels == "reference" or name not in ("int8", "int4"):
        assert torch.equal(attended, expected)
    else:
        torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


def test_float8_is_the_nearest_number_that_there_is():
    states = torch.tensor([[0.0, 1.0, -1.0625, 1.1875, 500.0, -torch.inf, torch.nan, 2.0**-10]])
    numbers, scales = Float8PageQuantizer().quantize(states)
    expected = torch.tensor([[0.0, 1.0, -1.0, 1.25, 448.0, -448.0, torch.nan, 0.0]])
    assert scales is None
    torch.testing.assert_close(numbers.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_the_built_in_ones_halve_the_bytes_of_a_bfloat16_cache():
    plain, int8, chosen = make("bfloat16"), make("int8"), make("bfloat16", Int8PageQuantizer())
    float8, int4 = make("float8_e4m3fn"), make("int4")
    assert plain.bytes_per_block == 2 * float8.bytes_per_block
    assert float8.tensor.shape == plain.tensor.shape
    assert plain.bytes_per_block == 2 * 2 * 2 * PAGE * 16 * 2
    assert int8.bytes_per_block == chosen.bytes_per_block == 2 * 2 * 2 * PAGE * (16 + 4)
    assert int4.bytes_per_block == 2 * 2 * 2 * PAGE * (16 // 2 + 4)
    assert int8.tensor.shape == chosen.tensor.shape == (15, 2, 2, 2, PAGE * 20)


def test_blocks_of_any_quantizer_are_one_span():
    cache = make(quantizer=Affine())
    assert cache.bytes_per_block == 2 * 2 * 2 * PAGE * (16 + 8) == cache.tensor[0].nbytes
    assert cache.views[0].key_scales.shape == (2, 15, PAGE, 2)


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        (3, r"quantizer is 3; it must have quantize\(\) and dequantize\(\)"),
        (lambda states: states.flatten(), r"makes numbers float32 \[16\]"),
        (lambda states: states.double(), r"makes numbers float64"),
    ],
)
def test_what_cannot_be_held_in_pages_is_refused(quantizer: object, message: str):
    with pytest.raises(ValueError, match=message):
        make(quantizer=quantizer)
