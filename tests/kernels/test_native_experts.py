"""Experts in one native call: against their definition in float64, and bit for bit in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_settings import on_instruction_sets, threads

from quire.kernels.cpu.experts import PackedExperts
from quire.kernels.cpu.kernel_set import NativeKernels
from quire.kernels.layers.expert_by_expert import ExpertByExpert
from quire.kernels.layers.experts import ExpertWeights, Mixture
from quire.kernels.layers.weights import (
    GroupedWeight,
    Weight,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from quire.kernels.reference import ReferenceKernels

ROWS, EXPERTS, CHOSEN = 200, 6, 3  # an expert gets more rows than a block has


def _clamped_swiglu(gate: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * torch.sigmoid(1.702 * gate)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "gelu": F.gelu,
    "clamped_swiglu": _clamped_swiglu,
}
# How weights are held and the type of rows, with the share of the largest result that an error may have: of
# what is rounded, and of inner numbers just between two of those that they are quantized to.
KINDS: dict[str, tuple[torch.dtype, dict[str, str], float]] = {
    "float32": (torch.float32, {}, 1e-6),
    "bfloat16": (torch.bfloat16, {}, 0.01),
    "float16": (torch.float16, {}, 0.002),
    "int8": (torch.float32, {}, 0.01),
    "int8 in bfloat16": (torch.bfloat16, {}, 0.02),
    "int4": (torch.float32, {}, 0.01),
    "int4 with bfloat16": (torch.bfloat16, {"int4_activations": "bfloat16"}, 0.02),
    "grouped_int8": (torch.float32, {}, 0.01),
    "mxfp4": (torch.float32, {}, 0.01),
}
SIZES = [(64, 48), (96, 16), (160, 40), (64, 7)]  # hidden, and inner features


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _held(weight: torch.Tensor, kind: str) -> Weight:
    if kind.startswith("int8"):
        return quantize_int8(weight)
    if weight.shape[1] % 16 or "float" in kind[:8]:
        return weight.to(KINDS[kind][0])
    held = quantize_int4(weight, 16 if weight.shape[1] % 32 else 32)
    if kind.startswith("int4"):
        return held
    if kind == "mxfp4" and weight.shape[1] % 32 == 0:
        doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 128
        scales = torch.full_like(held.scales, 1 / 8 / weight.shape[1] ** 0.5)
        scales = torch.exp2(torch.log2(scales).round())
        values = doubles[held.values.long()].to(torch.uint8)
        return GroupedWeight(values, scales, torch.full_like(scales, 128), bits=8, is_mxfp4=True)
    return GroupedWeight(held.values * 9, held.scales / 9, held.zeros * 9, bits=8)


def _weights(kind: str, hidden: int, inner: int, *, biased: bool) -> list[ExpertWeights]:
    def matrix(outputs: int, inputs: int, seed: int) -> Weight:
        return _held(_random(outputs, inputs, seed=seed) * 2 / inputs**0.5, kind)

    return [
        ExpertWeights(
            [matrix(inner, hidden, 5 * expert), matrix(inner, hidden, 5 * expert + 1)],
            [matrix(hidden, inner, 5 * expert + 2)],
            _random(2 * inner, seed=5 * expert + 3) if biased else None,
            _random(hidden, seed=5 * expert + 4) if biased else None,
        )
        for expert in range(EXPERTS)
    ]


def _as_multiplied(rows: torch.Tensor, weights: list[Weight], options: dict[str, str]) -> torch.Tensor:
    if isinstance(weights[0], torch.Tensor):
        return rows
    if options:
        return rows.bfloat16().double()
    return dequantize(quantize_int8(rows)).double()


def _expected(
    experts: list[ExpertWeights], mixture: Mixture, rows: torch.Tensor, scores: torch.Tensor, kind: str
) -> torch.Tensor:
    dtype, options, _ = KINDS[kind]
    likely, chosen = torch.softmax(scores.double(), dim=-1).topk(mixture.experts_per_token)
    result = torch.zeros(rows.shape, dtype=torch.float64)
    for number, expert in enumerate(experts):

        def product(inputs: torch.Tensor, parts: list[Weight], bias: torch.Tensor | None) -> torch.Tensor:
            matrix = torch.cat([dequantize(part) for part in parts]).double()
            made = _as_multiplied(inputs, parts, options) @ matrix.T
            return made if bias is None else made + bias

        gate, up = product(rows.double(), expert.gate_up, expert.gate_up_bias).chunk(2, dim=-1)
        if mixture.activation == "clamped_swiglu":
            up = up.clamp(-7, 7) + 1
        inner = (ACTIVATIONS[mixture.activation](gate) * up).to(dtype).double()
        weight = (likely * (chosen == number)).sum(dim=-1, keepdim=True)
        result += weight * product(inner, expert.down, expert.down_bias)
    return result


@on_instruction_sets(
    kind=list(KINDS), sizes=SIZES, activation=list(ACTIVATIONS), biased=[False, True]
)  # fmt: skip
def test_experts(
    instruction_set: str, kind: str, sizes: tuple[int, int], activation: str, biased: bool
) -> None:
    hidden, inner = sizes
    dtype, options, tolerance = KINDS[kind]
    mixture = Mixture(EXPERTS, CHOSEN, normalize=False, activation=activation)
    weights = _weights(kind, hidden, inner, biased=biased)
    experts = PackedExperts(weights, mixture, dtype=dtype, **options)
    rows = _random(ROWS, hidden, seed=1, dtype=dtype)
    scores = _random(ROWS, EXPERTS, seed=2)
    with threads(3):
        result = experts(rows, scores)
    expected = _expected(weights, mixture, rows, scores, kind)
    assert (result.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for start, count in ((0, 1), (7, 2), (30, 70)):
        part = slice(start, start + count)
        out = torch.full((count, 2 * hidden), torch.nan, dtype=dtype)[:, :hidden]
        experts(rows[part].clone(), scores[part].clone(), out=out)
        assert torch.equal(out, result[part])


def _vector(seed: int) -> torch.Tensor:
    return _random(EXPERTS, seed=seed).abs()


MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, normalized": {"normalize": True},
    "softmax, scaled": {"scale": 2.5, "correction": _vector(1) / 4},
    "softmax, groups": {"num_groups": 3, "groups_per_token": 2, "normalize": True},
    "softmax, scales of experts": {"expert_scales": _vector(2), "normalize": True},
    "sigmoid": {"scoring": "sigmoid"},
    "sigmoid, corrected": {"scoring": "sigmoid", "correction": _vector(3), "normalize": True, "scale": 1.8},
    "sigmoid, groups": {
        "scoring": "sigmoid", "correction": _vector(4), "num_groups": 2, "groups_per_token": 1, "scale": 2.5
    },
    "sigmoid, groups of one": {"scoring": "sigmoid", "num_groups": 6, "groups_per_token": 4},
    "sparsemixer": {"scoring": "sparsemixer", "jitter": 0.1},
}  # fmt: skip


@on_instruction_sets(
    mixture=list(MIXTURES), chosen=[1, CHOSEN], dtype=[torch.float32, torch.bfloat16]
)  # fmt: skip
def test_experts_are_chosen_as_the_reference_does(
    instruction_set: str, mixture: str, chosen: int, dtype: torch.dtype
) -> None:
    wanted = Mixture(EXPERTS, chosen, activation="silu", **({"normalize": False} | MIXTURES[mixture]))
    weights = _weights("float32", 64, 48, biased=True)
    rows = _random(ROWS, 64, seed=1)
    scores = _random(ROWS, 2 * EXPERTS, seed=2, dtype=dtype)[:, EXPERTS:]
    scores[:20] = scores[:20].round()  # of equals the first is chosen
    found = PackedExperts(weights, wanted, dtype=torch.float32)(rows, scores)
    expected = ExpertByExpert(weights, wanted, ReferenceKernels(), dtype=torch.float32)(rows, scores)
    same = (found - expected).abs().amax(1) <= 1e-5 * expected.abs().max()
    assert same[20:].all()
    assert mixture == "sparsemixer" or found[:20].isfinite().all()
    alone = PackedExperts(weights, wanted, dtype=torch.float32)(rows[3:4], scores[3:4])
    assert torch.equal(alone, found[3:4])


@on_instruction_sets(
    scoring=["softmax", "sigmoid", "sparsemixer"], unsound=[torch.nan, torch.inf, -torch.inf]
)
def test_unsound_scores_concern_their_row_only(instruction_set: str, scoring: str, unsound: float) -> None:
    wanted = Mixture(EXPERTS, CHOSEN, normalize=True, activation="silu", scoring=scoring)
    experts = PackedExperts(_weights("float32", 64, 48, biased=True), wanted, dtype=torch.float32)
    rows, scores = _random(ROWS, 64, seed=1), _random(ROWS, EXPERTS, seed=2)
    expected = experts(rows, scores)
    for places in (slice(2, 3), slice(None)):
        scores[5, places] = unsound
        found = experts(rows, scores)
        assert torch.equal(found[:5], expected[:5])
        assert torch.equal(found[6:], expected[6:])


def test_a_choice_that_cannot_be_made_is_refused() -> None:
    weights = _weights("float32", 64, 48, biased=False)
    for wrong in ({"num_groups": 4}, {"num_groups": 3, "groups_per_token": 4}):
        mixture = Mixture(EXPERTS, CHOSEN, normalize=False, activation="silu", **wrong)
        with pytest.raises(ValueError, match=f"from . of {wrong['num_groups']} groups"):
            PackedExperts(weights, mixture, dtype=torch.float32)
    with pytest.raises(ValueError, match="7 of 6 experts are chosen"):
        PackedExperts(weights, Mixture(EXPERTS, 7, normalize=False, activation="silu"), dtype=torch.float32)


def test_no_rows() -> None:
    mixture = Mixture(EXPERTS, CHOSEN, normalize=False, activation="silu")
    experts = PackedExperts(_weights("int4", 64, 48, biased=False), mixture, dtype=torch.bfloat16)
    assert experts(torch.empty(0, 64), torch.empty(0, EXPERTS)).shape == (0, 64)


def test_experts_must_be_alike() -> None:
    mixture = Mixture(2, 1, normalize=False, activation="silu")
    alike, other = (_weights(kind, 64, 48, biased=False)[0] for kind in ("int4", "int8"))
    with pytest.raises(ValueError, match="expert 1 is held as"):
        PackedExperts([alike, other], mixture, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the second matrix must take"):
        PackedExperts([alike._replace(down=alike.gate_up)] * 2, mixture, dtype=torch.bfloat16)
    biased = alike._replace(down_bias=torch.ones(64))
    with pytest.raises(ValueError, match="need all or none"):
        PackedExperts([alike, biased], mixture, dtype=torch.bfloat16)


def test_inputs_in_another_order() -> None:
    mixture = Mixture(2, 1, normalize=False, activation="silu")
    expert = _weights("int4", 64, 48, biased=False)[0]
    parts = []
    for part in expert.gate_up:
        assert isinstance(part, GroupedWeight)
        order = torch.arange(64).flip(0)
        parts.append(GroupedWeight(part.values, part.scales, part.zeros, 4, order))
    reordered = expert._replace(gate_up=parts)
    with pytest.raises(ValueError, match="inputs in another order"):
        PackedExperts([reordered] * 2, mixture, dtype=torch.bfloat16)
    experts = NativeKernels().experts([reordered] * 2, mixture, dtype=torch.bfloat16)
    assert isinstance(experts, ExpertByExpert)
