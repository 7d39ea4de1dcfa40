"""Parts of matrices in every form: the same numbers as in the whole."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.layers.weights import GroupedWeight, Int8Weight, Weight, dequantize, part_of, quantize_int8

ROWS, INPUTS = 48, 512


def _weights() -> dict[str, Weight]:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(ROWS, INPUTS, generator=generator)
    in_groups = {
        f"int{bits}-{size}": GroupedWeight(
            torch.randint(0, 1 << bits, (ROWS, INPUTS), generator=generator, dtype=torch.uint8),
            torch.rand(ROWS, INPUTS // size, generator=generator),
            torch.randint(0, 1 << bits, (ROWS, INPUTS // size), generator=generator).float(),
            bits,
        )
        for bits, size in ((4, 32), (4, 128), (8, 16), (8, 32))
    }
    return {"bfloat16": dense.bfloat16(), "int8": quantize_int8(dense), **in_groups}


@pytest.mark.parametrize("name", list(_weights()))
@pytest.mark.parametrize(
    ("axis", "ranges"),
    [
        (0, [range(16, 48)]),
        (0, [range(8), range(40, 45), range(5)]),
        (1, [range(128, 384)]),
        (1, [range(64, 192)]),
        (1, [range(96, 128), range(32)]),
    ],
)
def test_a_part_has_the_numbers_of_the_whole(name: str, axis: int, ranges: list[range]) -> None:
    weight = _weights()[name]
    chosen = torch.tensor([number for part in ranges for number in part])
    part = part_of(weight, axis, ranges)
    assert type(part) is type(weight)
    assert torch.equal(dequantize(part), dequantize(weight).index_select(axis, chosen))


def test_rows_of_a_mapped_matrix_are_not_copied() -> None:
    weight = torch.randn(8, 4)
    part = part_of(weight, 0, [range(2, 6)])
    assert isinstance(part, torch.Tensor)
    assert part.data_ptr() == weight[2:].data_ptr()
    int8 = part_of(quantize_int8(weight), 1, [range(2)])
    assert isinstance(int8, Int8Weight)
    assert int8.values.shape == (8, 2)


def test_groups_cut_too_small_for_any_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128, which cannot be divided at 8 and 256"):
        part_of(_weights()["int4-128"], 1, [range(8, 256)])
