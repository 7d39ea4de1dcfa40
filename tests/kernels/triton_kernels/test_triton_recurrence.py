"""Layers with a state in Triton: what the reference computes, bit for bit in any company and any chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recurrent_layers import (
    BEFORE,
    CASES,
    COUNTS,
    NUMBERS,
    TOLERANCE,
    Delta,
    RecurrentLayer,
    Scan,
    check_company_and_chunks,
    check_taken_in,
    layer_of,
    name_of,
    results,
    step_of,
)
from triton_inputs import DEVICE

from quire.kernels.devices.device import HOST
from quire.kernels.reference import ReferenceKernels
from quire.kernels.size_classes import CHUNK_SIZES, DECODE_SIZES, SizeClasses
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.recurrence import layers

KERNELS = TritonKernels()
ODD = [CASES[3], CASES[8], CASES[-2]]  # one of each kind
IN_HALVES = [CASES[1], CASES[6], CASES[-4]]


@pytest.fixture(params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several programs share what is computed."""
    monkeypatch.setattr(layers, "_CONV_BLOCK", 128)
    monkeypatch.setattr(layers, "_VALUES", 32)


def test_the_reference_s_numbers(case: Any) -> None:
    layer = layer_of(case, DEVICE)
    out, states = (each.cpu() for each in results(layer, KERNELS))
    expected, expected_states = results(layer_of(case), ReferenceKernels())
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=tolerance, rtol=tolerance)
    untouched = [number for number in range(6) if number not in NUMBERS]
    assert torch.equal(states[untouched], layer.states[0][untouched].cpu())


@pytest.mark.parametrize("case", ODD + IN_HALVES, ids=name_of)
def test_bits_depend_neither_on_company_nor_on_chunks(case: Any) -> None:
    check_company_and_chunks(layer_of(case, DEVICE), KERNELS)


@pytest.mark.parametrize("case", ODD, ids=name_of)
def test_a_state_takes_in_the_first_tokens_of_a_step(case: Any) -> None:
    check_taken_in(layer_of(case, DEVICE), KERNELS)


@pytest.mark.parametrize("case", ODD, ids=name_of)
@pytest.mark.parametrize("sizes", [DECODE_SIZES, CHUNK_SIZES])
def test_padding_rows_become_finite_and_change_nothing(case: Any, sizes: SizeClasses) -> None:
    layer = layer_of(case, DEVICE)
    expected, expected_states = results(layer, KERNELS)
    padded = step_of(COUNTS, BEFORE, NUMBERS).padded(sizes)
    num_added = padded.num_rows - sum(COUNTS)
    assert num_added > 0
    for name, wide in (("rows", 5), ("strengths", 0), ("inputs", 0), ("times", 0)):
        rows = getattr(layer, name, None)
        if rows is not None:
            setattr(layer, name, torch.cat([rows, rows.new_full((num_added, *rows.shape[1:]), 7.0 + wide)]))
    states = [layer.states[0].clone()]
    found = layer.run(KERNELS, slice(None), states, padded)
    assert torch.equal(found[:-num_added], expected)
    assert found.isfinite().all()
    assert torch.equal(states[0], expected_states)


def with_far_times(device: torch.device) -> Scan:
    layer = Scan(torch.float32, 8, 8, device=device)
    layer.heads = dataclasses.replace(layer.heads, time_limits=(0.0, 100.0))
    layer.times[:, 0], layer.times[:, 1], layer.times[:, 2] = -16.0, 60.0, 95.0
    layer.states[0].zero_()
    return layer


def test_times_far_from_0() -> None:
    """Where the logarithm of 1 + exp(time) leaves little, and where exp(time) is infinite."""
    _, states = results(with_far_times(DEVICE), KERNELS)
    _, expected = results(with_far_times(HOST), ReferenceKernels())
    for head in range(6):
        error = (states.cpu() - expected)[NUMBERS, head].abs().max()
        assert error <= 1e-5 * expected[NUMBERS, head].abs().max()


def test_numbers_that_are_not_finite_stay_in_their_head() -> None:
    layer = Scan(torch.float32, 8, 8, device=DEVICE)
    expected, expected_states = results(layer, KERNELS)
    layer.times[3, 4] = float("nan")  # of the second sequence's only token
    found, states = results(layer, KERNELS)
    is_wrong = found.isnan()
    assert is_wrong[3, 4 * 8 : 5 * 8].all()
    assert states[NUMBERS[1], 4].isnan().all()
    assert is_wrong.sum() == 8
    assert torch.equal(found[~is_wrong], expected[~is_wrong])
    assert (states == expected_states).logical_not().sum() == 8 * 8


def test_no_rows_are_no_work() -> None:
    empty = step_of([], [], [])
    for case in ODD:
        layer = layer_of(case, DEVICE)
        assert layer.run(KERNELS, slice(0, 0), layer.states, empty).shape[0] == 0


def change(layer: RecurrentLayer, name: str, changed: Callable[[Any], Any]) -> None:
    owner, *inner = name.split(".")
    if inner:
        changed_part = {inner[0]: changed(getattr(layer.heads, inner[0]))}
        layer.heads = dataclasses.replace(layer.heads, **changed_part)  # type: ignore[union-attr]
    else:
        setattr(layer, owner, changed(getattr(layer, owner)))


CONV, DELTA, SCAN = ODD
WRONG = [
    (CONV, "rows", lambda rows: rows[:, :-1], ValueError, "rows is"),
    (CONV, "rows", lambda rows: rows.double(), TypeError, "rows is torch.float64"),
    (CONV, "weight", lambda weight: weight.double(), TypeError, "the weight is"),
    (CONV, "weight", lambda weight: weight[:1], ValueError, "1 taps"),
    (CONV, "bias", lambda _: torch.ones(3, device=DEVICE), ValueError, "the bias is"),
    (CONV, "activation", lambda _: "gelu", ValueError, "activation 'gelu'"),
    (CONV, "states", lambda states: [states[0].double()], TypeError, "the state is"),
    (CONV, "states", lambda states: [states[0][:, :1]], ValueError, "the state is"),
    (CONV, "states", lambda states: [states[0][:3]], IndexError, "state 5; there are 3"),
    (DELTA, "rows", lambda rows: rows[:, :-1], ValueError, "qkv is"),
    (DELTA, "strengths", lambda strengths: strengths.bfloat16(), TypeError, "strengths is"),
    (DELTA, "times", lambda times: times[:, :-1], ValueError, "times is"),
    (DELTA, "heads.time_bias", lambda bias: bias.expand(-1, 2), ValueError, "2 times"),
    (DELTA, "heads.num_keys", lambda _: 4, ValueError, "4 key heads and 6"),
    (DELTA, "heads.decay", lambda decay: decay[:5], ValueError, "decay is"),
    (DELTA, "states", lambda states: [states[0].bfloat16()], TypeError, "the state is"),
    (SCAN, "inputs", lambda inputs: inputs[:, :-1], ValueError, "inputs is"),
    (SCAN, "times", lambda times: times[:, :-1], ValueError, "times is"),
    (SCAN, "heads.num_groups", lambda _: 4, ValueError, "6 heads and 4 groups"),
    (SCAN, "heads.skip", lambda skip: skip.double(), TypeError, "skip is"),
    (SCAN, "states", lambda states: [states[0].transpose(2, 3)], ValueError, "the state is"),
]


@pytest.mark.parametrize(("case", "name", "changed", "error", "message"), WRONG)
def test_wrong_tensors_are_refused(
    case: Any, name: str, changed: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    layer = layer_of(case, DEVICE)
    change(layer, name, changed)
    with pytest.raises(error, match=message):
        layer.run(KERNELS, slice(None), layer.states, step_of(COUNTS, BEFORE, NUMBERS))


def test_wrong_steps_are_refused() -> None:
    layer = Delta(torch.float32, 8, 8, device=DEVICE)
    steps = [
        (step_of(COUNTS, BEFORE, [4, 0, 2, 2]), ValueError, "its own"),
        (step_of(COUNTS, BEFORE, NUMBERS, [3, 1, 21, 2]), IndexError, "at least 1"),
        (step_of(COUNTS, BEFORE, [4, 0, 2, -1]), IndexError, "down to -1"),
        (dataclasses.replace(step_of(COUNTS, BEFORE, NUMBERS), states=None), ValueError, "no states"),
    ]
    for step, error, message in steps:
        with pytest.raises(error, match=message):
            layer.run(KERNELS, slice(None), layer.states, step)
    assert np.array_equal(layer.states[0].cpu(), Delta(torch.float32, 8, 8).states[0])
