"""The largest products without all of them: the bits of a plain layer, and none of the largest missing."""

from __future__ import annotations

import pytest
import torch
from native_settings import on_instruction_sets, threads

from quire.kernels.cpu import linear
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.cpu.linear import PackedLinear, ShortlistedLinear
from quire.kernels.devices.memory import WeightMemory
from quire.kernels.layers.linear import Linear
from quire.models.checkpoints.cached_weights import FilledMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEVER = float("-inf")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layers(weight: torch.Tensor, dtype: torch.dtype) -> tuple[ShortlistedLinear, PackedLinear]:
    return ShortlistedLinear([weight.to(dtype)], dtype=dtype), PackedLinear([weight.to(dtype)], dtype=dtype)


def _largest(layer: Linear, rows: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.full((len(rows), layer.out_features), float("nan"))
    assert layer.largest(rows, torch.tensor([count]), out=out) is out
    return out


def _check(found: torch.Tensor, every: torch.Tensor, count: int) -> None:
    """Check results against all of them: which may be missing, and that the others have the same bits."""
    is_found = found != NEVER
    assert torch.equal(found[is_found].view(torch.int32), every[is_found].view(torch.int32))
    for row, all_of_row in zip(found, every, strict=True):
        if all_of_row.isnan().any():
            assert row.isnan().any()
            continue
        least = all_of_row.sort(descending=True).values[min(count, len(row)) - 1]
        assert (row == all_of_row)[all_of_row >= least].all()


@on_instruction_sets(
    dtype=DTYPES,
    shape=[(1, 1), (31, 7), (33, 64), (500, 100), (3000, 256), (2049, 1030)],
    num_rows=[1, 2, 5, 6],
    count=[1, 2, 20, 128, 5000],
)
def test_the_largest_are_there_with_their_bits(
    instruction_set: str, dtype: torch.dtype, shape: tuple[int, int], num_rows: int, count: int
) -> None:
    layer, plain = _layers(_random(*shape) * 0.02, dtype)
    rows = _random(num_rows, shape[1], seed=1).to(dtype)
    every = plain(rows, out=torch.empty(num_rows, shape[0]))
    _check(_largest(layer, rows, count), every, count)
    assert torch.equal(_largest(layer, rows, 0), every)
    assert torch.equal(layer(rows, out=torch.empty_like(every)), every)


@on_instruction_sets(dtype=DTYPES)
def test_few_products_are_computed_of_an_output_layer(instruction_set: str, dtype: torch.dtype) -> None:
    layer, plain = _layers(_random(40_000, 128), dtype)
    rows = _random(2, 128, seed=1).to(dtype)
    every = plain(rows, out=torch.empty(2, 40_000))
    found = _largest(layer, rows, 5)
    _check(found, every, 5)
    assert (found != NEVER).sum() < 0.3 * found.numel()


@on_instruction_sets(dtype=DTYPES, seed=range(3))
def test_errors_that_all_point_one_way_are_bounded(
    instruction_set: str, dtype: torch.dtype, seed: int
) -> None:
    """The row that wins is the one that its copy in int8 is furthest below, for these inputs."""
    size = 256
    weight = _random(2000, size, seed=seed).to(dtype).float()
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    lacking = weight - (weight / scales).round() * scales
    for best in range(0, 2000, 97):
        rows = (lacking[best : best + 1] / lacking[best].norm() + 1e-3 * weight[best : best + 1]).to(dtype)
        layer, plain = _layers(weight, dtype)
        _check(_largest(layer, rows, 1), plain(rows, out=torch.empty(1, 2000)), 1)


def _unusual_weight(kind: str, dtype: torch.dtype) -> torch.Tensor:
    weight = _random(3000, 96)
    match kind:
        case "equal":
            weight[:] = weight[0].clone()
        case "equal in pairs":
            weight[1::2] = weight[::2].clone()
        case "tiny":
            weight *= 1e-6 if dtype == torch.float16 else 1e-36
        case "one large row":
            weight[77] *= 1000
        case "zero":
            weight[:] = 0
        case "nan" | "inf":
            weight[1234, 5] = float(kind)
    return weight


def _unusual_rows(kind: str, dtype: torch.dtype) -> torch.Tensor:
    rows = _random(2, 96, seed=1)
    match kind:
        case "outlier":
            rows[:, 3] = 3000
        case "tiny":
            rows *= 1e-6 if dtype == torch.float16 else 1e-37
        case "huge":
            rows *= 1e4 if dtype == torch.float16 else 1e30
        case "overflowing":
            rows *= 1e4 if dtype == torch.float16 else 5e37
        case "zero":
            rows[:] = 0
        case "nan" | "inf":
            rows[1, 7] = float(kind)
    return rows.to(dtype)


@on_instruction_sets(
    dtype=DTYPES,
    rows=["outlier", "zero", "tiny", "huge", "overflowing", "nan", "inf", "ordinary"],
    weights=["equal", "equal in pairs", "zero", "nan", "inf", "tiny", "ordinary", "one large row"],
)
def test_unusual_numbers(instruction_set: str, dtype: torch.dtype, rows: str, weights: str) -> None:
    weight, inputs = _unusual_weight(weights, dtype), _unusual_rows(rows, dtype)
    layer, plain = _layers(weight, dtype)
    every = plain(inputs, out=torch.empty(2, 3000))
    for count in (1, 3):
        _check(_largest(layer, inputs, count), every, count)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_results_are_the_same_on_any_number_of_threads(num_threads: int) -> None:
    layer, _ = _layers(_random(5000, 64), torch.bfloat16)
    rows = _random(3, 64, seed=1).bfloat16()
    expected = _largest(layer, rows, 4)
    with threads(num_threads):
        assert torch.equal(_largest(layer, rows, 4), expected)


def test_where_shortlists_are_too_long_all_products_are_computed_for_a_while() -> None:
    layer, plain = _layers(torch.ones(4000, 64), torch.bfloat16)
    rows = torch.ones(1, 64, dtype=torch.bfloat16)
    for _ in range(70):
        assert torch.equal(_largest(layer, rows, 1), plain(rows, out=torch.empty(1, 4000)))


def test_an_output_layer_has_a_copy_if_it_is_large_and_in_floating_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, weight = NativeKernels(), _random(512, 64)
    monkeypatch.setattr(linear, "MIN_SHORTLISTED_BYTES", 512 * 64 * 2)
    assert kernels.output_linear([weight], dtype=torch.bfloat16).finds_largest
    assert kernels.output_linear([weight[:256], weight[256:]], dtype=torch.bfloat16).finds_largest
    others = [
        kernels.output_linear([weight[1:]], dtype=torch.bfloat16),
        kernels.output_linear([weight], dtype=torch.bfloat16, quantization="int8"),
        kernels.output_linear([weight], torch.ones(512), dtype=torch.bfloat16),
        kernels.linear([weight], dtype=torch.bfloat16),
    ]
    assert not any(layer.finds_largest for layer in others)
    rows, out = _random(2, 64, seed=1), torch.empty(2, 512)
    assert torch.equal(others[2].largest(rows, 1, out=out), others[2](rows))


def test_a_copy_comes_from_memory_that_is_filled() -> None:
    class Recording(WeightMemory):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            buffers.append(super().allocate(-(-num_bytes // 64) * 64))
            return buffers[-1][:num_bytes]

    buffers: list[torch.Tensor] = []
    weight, rows = _random(2000, 64), _random(1, 64, seed=1)
    first = ShortlistedLinear([weight], dtype=torch.float32, memory=Recording())
    again = ShortlistedLinear(
        [weight.to("meta")], dtype=torch.float32, memory=FilledMemory([buffer.clone() for buffer in buffers])
    )
    assert torch.equal(_largest(again, rows, 1), _largest(first, rows, 1))


@pytest.mark.parametrize(
    ("count", "out", "said"),
    [
        (torch.tensor([1], dtype=torch.int32), torch.empty(1, 100), "int32"),
        (torch.tensor([1, 2]), torch.empty(1, 100), r"\[2\]"),
        (torch.tensor([1]), torch.empty(1, 100, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_other_types_are_refused(count: torch.Tensor, out: torch.Tensor, said: str) -> None:
    layer = ShortlistedLinear([_random(100, 16)], dtype=torch.float32)
    with pytest.raises(TypeError, match=said):
        layer.largest(_random(1, 16), count, out=out)
    with pytest.raises(ValueError, match="rows"):
        layer.largest(_random(1, 15), torch.tensor([1]), out=torch.empty(1, 100))
