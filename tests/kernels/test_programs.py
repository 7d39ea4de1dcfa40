"""Steps that are recorded and computed again: what was recorded with other numbers, and what cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from caches import make_cache
from quire.kernels import has_native_kernels
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.interface import NotCapturableError

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="the native kernels are not built")

if has_native_kernels():
    from quire.kernels.cpu import _native
    from quire.kernels.cpu.kernel_set import NativeKernels
    from quire.kernels.cpu.programs import NativePrograms

    KERNELS, PROGRAMS = NativeKernels(), NativePrograms()

HIDDEN = 64


def mixed_layer(rows: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Return what computes `out` of `rows` by native kernels and by torch, in place and not."""
    torch.manual_seed(1)
    linear = KERNELS.linear([torch.randn(2 * HIDDEN, HIDDEN)], dtype=torch.float32)
    weight, offset = torch.randn(HIDDEN), torch.randn(HIDDEN)

    def compute() -> None:
        normed = KERNELS.rms_norm(rows, weight, eps=1e-6)
        largest, _ = (normed + offset).topk(HIDDEN, dim=-1)
        gated = KERNELS.gated_activation(linear(largest.mul_(0.5)), "silu")
        out.copy_(KERNELS.rms_norm(gated.view(-1, HIDDEN), weight, eps=1e-6))

    return compute


@torch.inference_mode()
def test_what_is_replayed_is_computed_of_new_numbers() -> None:
    rows, out = torch.empty(3, HIDDEN), torch.zeros(3, HIDDEN)
    compute = mixed_layer(rows, out)
    rows.normal_()
    replay = PROGRAMS.capture(compute)
    for _ in range(3):
        rows.normal_()
        replay()
        replayed = out.clone()
        out.zero_()
        compute()
        assert torch.equal(replayed, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_are_taken_by_native_kernels(dtype: torch.dtype) -> None:
    table, places = torch.randn(50, HIDDEN).to(dtype), torch.zeros(7, dtype=torch.int64)
    out = torch.zeros(14, HIDDEN, dtype=dtype)

    def compute() -> None:
        embedded = torch.nn.functional.embedding(places, table)
        weight = torch.ones(HIDDEN)
        KERNELS.rms_norm(embedded, weight, eps=1e-6, out=out[:7])
        KERNELS.rms_norm(table.index_select(0, places), weight, eps=1e-6, out=out[7:])

    replay = PROGRAMS.capture(compute)
    places.copy_(torch.tensor([49, 0, 3, 3, 7, 1, 20]))
    replay()
    replayed = out.clone()
    compute()
    assert torch.equal(replayed, out)
    for wrong in (50, -1):
        places[3] = wrong
        with pytest.raises(IndexError):
            replay()


@torch.inference_mode()
def test_captures_share_the_memory_of_their_results() -> None:
    steps = []
    for num_rows in (3, 3000, 5):
        rows, out = torch.randn(num_rows, HIDDEN), torch.zeros(num_rows, HIDDEN)
        compute = mixed_layer(rows, out)
        steps.append((compute, PROGRAMS.capture(compute), rows, out))
    for compute, replay, rows, out in steps * 2:
        rows.normal_()
        replay()
        replayed = out.clone()
        compute()
        assert torch.equal(replayed, out)


@torch.inference_mode()
def test_kernels_compute_nothing_while_they_are_recorded() -> None:
    rows, weight = torch.ones(2, HIDDEN), torch.full((HIDDEN,), 2.0)
    out = torch.zeros(2, HIDDEN)
    replay = PROGRAMS.capture(lambda: KERNELS.rms_norm(rows, weight, eps=0.0, out=out))
    assert not out.any()
    replay()
    assert torch.equal(out, torch.full_like(out, 2.0))


def fails() -> None:
    raise ZeroDivisionError


def uses_a_number() -> None:
    float(torch.ones(1))


def uses_a_mask() -> None:
    torch.where(torch.ones(2) > 0)


def uses_arrays_of_its_own() -> None:
    batch = AttentionBatch.build(np.array([3]), np.array([1]), np.zeros((1, 1), dtype=np.int32), 16)
    layer = make_cache(1, 1, 1, 16, HIDDEN, torch.float32).views[0]
    KERNELS.paged_attention(torch.ones(1, 1, HIDDEN), layer, batch, scale=1.0)


def uses_the_reference() -> None:
    batch = AttentionBatch.build(np.array([3]), np.array([1]), np.zeros((1, 1), dtype=np.int32), 16)
    layer = make_cache(1, 1, 1, 16, 12, torch.float32).views[0]
    KERNELS.rotary_and_write_kv(
        torch.ones(1, 36), layer, batch, heads=HeadLayout(1, 1, 12), cos=None, sin=None, q_norm=None,
        k_norm=None, eps=0.0,
    )  # fmt: skip
    KERNELS.paged_attention(torch.ones(1, 1, 12), layer, batch, scale=1.0)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("compute", "error"),
    [
        (fails, ZeroDivisionError),
        (uses_a_number, NotCapturableError),
        (uses_a_mask, NotCapturableError),
        (uses_arrays_of_its_own, NotCapturableError),
        (uses_the_reference, NotCapturableError),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_nothing_is_recorded_then(
    compute: Callable[[], None], error: type[Exception]
) -> None:
    with pytest.raises(error):
        PROGRAMS.capture(compute)
    assert not _native.is_recording()
    if error is NotCapturableError:
        compute()


def test_a_capture_does_not_import_torch_s_compiler() -> None:
    script = """
import sys
import torch
from quire.kernels.cpu.programs import NativePrograms
out = torch.zeros(2)
NativePrograms().capture(lambda: out.copy_(torch.ones(2) + 1))()
assert out.tolist() == [2, 2]
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
