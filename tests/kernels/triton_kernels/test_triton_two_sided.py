"""Two-sided attention in Triton's interpreter: against float64 attention, and its bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from row_attention import attended, naive, random_bias, random_rows
from triton_inputs import RELATIVE, random

from pairwise import pairwise
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVOfRows
from quire.kernels.attention.tiles import HeadLayout
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.attention import items as attention_items
from quire.kernels.triton.attention import plan as attention_plan
from quire.kernels.triton.kernel_set import TritonKernels

KERNELS = TritonKernels()
WINDOW = 9
LENGTHS = [1, 130, 2, WINDOW, WINDOW + 1, 65]
LAYOUTS = {"4x2x32": HeadLayout(4, 2, 32), "2x2x64": HeadLayout(2, 2, 64), "3x1x24": HeadLayout(3, 1, 24)}
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
NEVER, ALWAYS = 1, 1 << 40  # programs that are wanted: a query tile's keys are divided never or always


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one.to(KERNELS.device) if isinstance(one, torch.Tensor) else one
        for name, one in options.items()
    }


def check(rows: list[torch.Tensor], heads: HeadLayout, **options: Any) -> None:
    found = attended(KERNELS, rows, heads, **on_device(options)).split([len(each) for each in rows])
    for each, result in zip(rows, found, strict=True):
        expected = naive(each, heads, **options)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[each.dtype], rtol=0)


@pairwise(heads=LAYOUTS, dtype=list(TOLERANCES), window=[0, 1, WINDOW, 66, 2000], softcap=[0.0, 1.5])
def test_each_token_sees_both_sides(
    heads: HeadLayout, dtype: torch.dtype, window: int, softcap: float
) -> None:
    check(random_rows(LENGTHS, heads, dtype), heads, window=window, softcap=softcap)


@pairwise(
    heads=LAYOUTS,
    dtype=list(TOLERANCES),
    most=[0, 5, 50, 1500],
    window=[0, WINDOW, 66],
    softcap=[0.0, 1.5],
)
def test_scores_get_a_bias_by_distance(
    heads: HeadLayout, dtype: torch.dtype, most: int, window: int, softcap: float
) -> None:
    bias = random_bias(heads, most)
    check(random_rows(LENGTHS, heads, dtype), heads, distance_bias=bias, window=window, softcap=softcap)


@pytest.mark.parametrize("programs", [NEVER, ALWAYS], ids=["whole", "divided"])
@pytest.mark.parametrize("window", [0, 200])
def test_long_sequences(window: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_items, "PROGRAMS", programs)
    heads = HeadLayout(2, 1, 16)
    bias = random_bias(heads, 128)
    check(random_rows([512, 3, 511], heads, torch.bfloat16), heads, window=window, distance_bias=bias)


@pytest.mark.parametrize(("window", "most"), [(0, None), (WINDOW, None), (70, 20), (0, 70)])
def test_bits_do_not_depend_on_company(
    window: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "MAX_FLOAT32_ROWS", attention_plan.ROW_CLASSES[-1])
    heads = HeadLayout(3, 1, 24)
    bias = None if most is None else random_bias(heads, most)
    options = on_device({"window": window, "distance_bias": bias})
    rows = [each.half().float() for each in random_rows([5, 300, 2, 20], heads)]  # products are exact
    lengths = [len(each) for each in rows]
    results = []
    for programs, order in ((NEVER, 1), (ALWAYS, -1)):
        monkeypatch.setattr(attention_items, "PROGRAMS", programs)
        found = attended(KERNELS, rows[::order], heads, **options)
        results.append(found.split(lengths[::order])[::order])
    for each, one, other in zip(rows, *results, strict=True):
        alone = attended(KERNELS, [each], heads, **options)
        assert torch.equal(alone, one)
        assert torch.equal(alone, other)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_queries_and_keys_are_turned_where_they_are(dtype: torch.dtype) -> None:
    heads = HeadLayout(4, 2, 32)
    batch = AttentionBatch.build(np.zeros(2), np.array([7, 4]), np.zeros((2, 7)), 1).over_rows()
    rows = random_rows([11], heads, dtype)[0]
    angles = random(11, 16) * 3
    parts = {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "q_norm": random(32, seed=1),
        "k_norm": random(32, seed=2),
    }
    found = []
    for kernels in (KERNELS, ReferenceKernels()):
        qkv = rows.to(kernels.device, copy=True)
        on_device = {name: part.to(kernels.device) for name, part in parts.items()}
        kernels.rotary_and_write_kv(qkv, KVOfRows.of(qkv, heads), batch, heads=heads, eps=1e-6, **on_device)
        found.append(qkv.cpu())
    tolerance = 3 * RELATIVE[dtype]
    torch.testing.assert_close(*found, rtol=tolerance, atol=3 * tolerance)
    assert torch.equal(found[0][:, -64:], rows[:, -64:])
    assert not torch.isclose(found[0][:, :-64], rows[:, :-64]).all(0).any()


@pytest.mark.filterwarnings("ignore:All-NaN")  # of numpy, in the interpreter
def test_a_token_that_is_not_finite_spoils_its_own_sequence_only() -> None:
    heads = HeadLayout(2, 1, 16)
    rows = random_rows(LENGTHS, heads)
    expected = attended(KERNELS, rows, heads, window=WINDOW).split(LENGTHS)
    rows[1][100] = float("nan")
    found = attended(KERNELS, rows, heads, window=WINDOW).split(LENGTHS)
    assert found[1][100].isnan().all()
    assert all(torch.equal(found[n], expected[n]) for n in range(len(rows)) if n != 1)
