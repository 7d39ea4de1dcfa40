"""Layers with a state: the native kernels against the reference, and each against itself in other chunks."""

from __future__ import annotations

import pytest
import torch
from recurrent_layers import (
    CASES,
    NUMBERS,
    TOLERANCE,
    RecurrentLayer,
    check_company_and_chunks,
    check_taken_in,
    layer_of,
    name_of,
    results,
)

from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.interface import KernelSet
from quire.kernels.reference import ReferenceKernels

of_both_kernels = pytest.mark.parametrize(
    "kernels", [NativeKernels(), ReferenceKernels()], ids=lambda each: each.name
)


@pytest.fixture(params=CASES, ids=name_of)
def layer(request: pytest.FixtureRequest) -> RecurrentLayer:
    return layer_of(request.param)


@pytest.mark.usefixtures("instruction_set")
def test_native_kernels_compute_what_the_reference_does(layer: RecurrentLayer) -> None:
    out, states = results(layer, NativeKernels())
    expected, expected_states = results(layer, ReferenceKernels())
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=tolerance, rtol=tolerance)
    untouched = [number for number in range(6) if number not in NUMBERS]
    assert torch.equal(states[untouched], layer.states[0][untouched])


@of_both_kernels
def test_bits_depend_neither_on_company_nor_on_chunks(layer: RecurrentLayer, kernels: KernelSet) -> None:
    check_company_and_chunks(layer, kernels)


@of_both_kernels
def test_a_state_takes_in_the_first_tokens_of_a_step(layer: RecurrentLayer, kernels: KernelSet) -> None:
    check_taken_in(layer, kernels)
