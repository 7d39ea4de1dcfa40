"""Attention in Triton over latents: one KV head of many features, whose keys are its values."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attention_harness import Sequences, naive_attention, run_paged
from triton_inputs import DEVICE, Layer

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.triton.attention import items, layer
from quire.kernels.triton.kernel_set import TritonKernels

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-6}
NEVER, ALWAYS = 1, 1 << 40  # programs that are wanted: a query tile's keys are divided never or always


def attend(
    query: torch.Tensor,
    kv: Any,
    batch: AttentionBatch,
    *,
    keys_are_values: bool = True,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attend where the kernels run, with what is on the CPU."""
    parts = (kv.key_pages, kv.value_pages, kv.key_scales, kv.value_scales)
    latents = Layer(*(None if part is None else part.to(DEVICE) for part in parts), kv.quantizer)
    if keys_are_values:
        latents.value_pages, latents.value_scales = latents.key_pages, latents.key_scales
    sinks = None if sinks is None else sinks.to(DEVICE)
    attended = TritonKernels().paged_attention(query.to(DEVICE), latents, batch, sinks=sinks, **options)
    return out.copy_(attended)


def latents_of(lengths: list[int], heads: int, head_dim: int) -> Sequences:
    """Return sequences whose products are exact in float64, in whatever order the interpreter adds them."""
    sequences = Sequences.random(lengths, heads, 1, head_dim)
    sequences.query[:], sequences.key[:] = (
        [states.half().float() for states in part] for part in (sequences.query, sequences.key)
    )
    sequences.value = sequences.key
    return sequences


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "kv_dtype", "options"),
    [
        (16, 576, torch.bfloat16, torch.bfloat16, {}),  # DeepSeek-V2-Lite
        (40, 288, torch.float32, torch.float32, {"softcap": 1.5}),  # MiniCPM3
        (32, 576, torch.bfloat16, torch.int8, {"window": 40}),
        (17, 261, torch.float32, torch.float32, {"sinks": torch.linspace(-1, 2, 17)}),
        (5, 28, torch.float32, torch.int8, {}),
    ],
)
def test_equals_textbook_attention(
    heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    sequences = latents_of([75, 9], heads, head_dim)
    outputs = run_paged(sequences, kernel=attend, dtype=dtype, kv_dtype=kv_dtype, chunks=70, **options)
    cached = sequences.as_cached(dtype, kv_dtype)
    for index, output in enumerate(outputs):
        expected = naive_attention(cached, index, **options)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heads of 40 features be two tiles, and tiles have room for two of them."""
    monkeypatch.setattr(items, "WHOLE_FEATURES", 16)
    monkeypatch.setattr(layer, "LATENT_HEADS", 2)


@pytest.mark.usefixtures("small_tiles")
def test_bits_do_not_depend_on_chunks_company_or_who_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, first = latents_of([70, 290], 6, 40), [60, 270]
    results = []
    for programs, how in (
        (NEVER, {"chunks": 10_000}),
        (ALWAYS, {"chunks": 10_000}),
        (ALWAYS, {"chunks": 1, "block_size": 8}),
        (NEVER, {"chunks": 7, "block_size": 32, "seed": 3}),
    ):
        monkeypatch.setattr(items, "PROGRAMS", programs)
        together = run_paged(sequences, kernel=attend, first_chunks=first, **how)
        results.append([output[start:] for output, start in zip(together, first, strict=True)])
    for index, start in enumerate(first):
        alone = run_paged(sequences.pick(index), kernel=attend, first_chunks=first[index : index + 1])
        assert all(torch.equal(result[index], alone[0][start:]) for result in results)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_heads_of_two_tiles_may_have_values(kv_dtype: torch.dtype) -> None:
    sequences = Sequences.random([75, 9], 4, 2, 40)
    kernel = functools.partial(attend, keys_are_values=False)
    outputs = run_paged(sequences, kernel=kernel, kv_dtype=kv_dtype, chunks=70)
    cached = sequences.as_cached(torch.float32, kv_dtype)
    for index, output in enumerate(outputs):
        torch.testing.assert_close(output.double(), naive_attention(cached, index), atol=3e-6, rtol=3e-6)
