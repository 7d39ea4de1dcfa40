"""A mixture of experts in Triton: against one in float64, and bit for bit in any company."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from triton_inputs import DEVICE, RELATIVE, poisoned, random, strided

from meta_device import META
from pairwise import pairwise
from quire.config import SchedulerConfig
from quire.engine.memory.plan import activation_bytes
from quire.kernels.layers.experts import CLAMPED_SWIGLU, ExpertWeights, Mixture
from quire.kernels.layers.weights import (
    Float8Weight,
    GroupedWeight,
    Weight,
    dequantize,
    quantize_int4,
    quantize_int8,
)
from quire.kernels.reference import ReferenceKernels
from quire.kernels.triton.experts import layer as experts
from quire.kernels.triton.experts import matrices as expert_matrices
from quire.kernels.triton.experts import routing as expert_routing
from quire.kernels.triton.kernel_set import TritonKernels
from quire.kernels.triton.linear import dense as linear
from quire.kernels.triton.linear.tiled import Tile
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.hub import resolve_model
from quire.models.layer import LayerConfig
from quire.models.layers.experts import ExpertsConfig

# The interpreter computes in numpy, which warns of differences of infinite numbers.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

HIDDEN, SIZE, GROUP, BLOCK = 64, 48, 16, (16, 32)
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"), "gelu": F.gelu}
# How weights are held, and the type of rows.
KINDS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.float32,
    "grouped_int8": torch.bfloat16,
    "float8": torch.float32,
    "float8_blocks": torch.bfloat16,
}
# What inner numbers that are just between two of those that they are quantized to may change.
TOLERANCE = {"int8": 0.02, "int4": 0.02, "grouped_int8": 0.02, "float8": 0.05, "float8_blocks": 0.05}

make_experts = TritonKernels().experts


def weights_of(
    num_experts: int, kind: str = "float32", *, is_gated: bool = True, has_bias: bool = False
) -> list[ExpertWeights]:
    """Return random experts, whose weights are held as `kind`."""
    parts = 2 if is_gated else 1

    def matrix(outputs: int, inputs: int, number: int) -> Weight:
        weight = random(outputs, inputs, seed=number).cpu() / inputs**0.5
        if kind == "int8":
            return quantize_int8(weight)
        if kind == "int4":
            return quantize_int4(weight, GROUP)
        if kind == "grouped_int8":
            held = quantize_int4(weight, GROUP)
            return dataclasses.replace(
                held, values=held.values * 9 + 7, scales=held.scales / 9, zeros=held.zeros * 9 + 7, bits=8
            )
        if kind == "float8":
            scales = weight.abs().amax(dim=1, keepdim=True) / 448
            return Float8Weight((weight / scales).to(torch.float8_e4m3fn), scales, (1, inputs))
        if kind == "float8_blocks":
            scales = random(-(-outputs // BLOCK[0]), -(-inputs // BLOCK[1]), seed=number).cpu().exp()
            return Float8Weight(weight.to(torch.float8_e4m3fn), scales, BLOCK)
        return weight.to(KINDS[kind])

    return [
        ExpertWeights(
            [matrix(SIZE, HIDDEN, 3 * expert + part) for part in range(parts)],
            [matrix(HIDDEN, SIZE, 3 * expert + 2)],
            random(parts * SIZE, seed=100 + expert).cpu() if has_bias else None,
            random(HIDDEN, seed=200 + expert).cpu() if has_bias else None,
        )
        for expert in range(num_experts)
    ]


def as_multiplied(vector: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the inputs of a matrix that is held as `kind` as they are multiplied, [n] float64."""
    if kind in ("float32", "bfloat16"):
        return vector
    if "float8" not in kind:
        return dequantize(quantize_int8(vector[None]))[0].double()
    groups = vector.split(BLOCK[1] if kind == "float8_blocks" else len(vector))
    scales = [group.abs().max() / 448 for group in groups]
    return torch.cat(
        [
            (group / scale).to(torch.float8_e4m3fn).double() * scale
            for group, scale in zip(groups, scales, strict=True)
        ]
    )


def inner_of(products: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Return what an expert's first products become."""
    if not mixture.is_gated:
        return products.relu().square()
    gate, up = products.chunk(2)
    if mixture.activation != CLAMPED_SWIGLU:
        return ACTIVATIONS[mixture.activation](gate) * up
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


def computed(
    weights: list[ExpertWeights],
    mixture: Mixture,
    rows: torch.Tensor,
    scores: torch.Tensor,
    kind: str = "float32",
) -> torch.Tensor:
    """Return what the experts give, [T, hidden] float64, token by token as the definition has it."""

    def product(weight: Weight, vector: torch.Tensor) -> torch.Tensor:
        return dequantize(weight).double() @ as_multiplied(vector, kind)

    results = []
    for row, score in zip(rows.cpu().double(), scores.cpu().double(), strict=True):
        probabilities = score.softmax(0)
        chosen = probabilities.sort(descending=True, stable=True).indices[: mixture.experts_per_token]
        shares = probabilities[chosen]
        if mixture.normalize:
            shares = shares / shares.sum()
        result = torch.zeros(HIDDEN, dtype=torch.float64)
        for number, share in zip(chosen.tolist(), shares, strict=True):
            expert = weights[number]
            products = torch.cat([product(part, row) for part in expert.gate_up])
            biases = [0.0 if bias is None else bias.double() for bias in expert[2:]]
            inner = inner_of(products + biases[0], mixture)
            result += share * (product(expert.down[0], inner) + biases[1])
        results.append(result)
    return torch.stack(results)


@pairwise(
    kind=list(KINDS),
    chosen=[(5, 2), (4, 3)],
    activation=["silu", "gelu_tanh", CLAMPED_SWIGLU, "relu2"],
    normalized=[False, True],
    has_bias=[False, True],
)
def test_sums_of_experts(
    kind: str,
    chosen: tuple[int, int],
    activation: str,
    normalized: bool,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Every matrix is cut into several tiles.
    monkeypatch.setattr(expert_matrices, "tile_of", lambda *_: Tile(32, 16, 32, 4, 2))
    num_experts, _ = chosen
    mixture, dtype = Mixture(*chosen, normalized, activation, is_gated=activation != "relu2"), KINDS[kind]
    weights = weights_of(num_experts, kind, is_gated=mixture.is_gated, has_bias=has_bias)
    factor = 5.0 if activation == CLAMPED_SWIGLU else 1.0  # so that some are beyond its limits
    rows, scores = random(4, HIDDEN, dtype=dtype) * factor, random(4, num_experts, dtype=dtype, seed=1)
    layer = make_experts(weights, mixture, dtype=dtype)
    out = strided(poisoned(4, HIDDEN, dtype=torch.float32))
    assert layer(strided(rows), strided(scores), out=out) is out
    expected = computed(weights, mixture, rows, scores, kind)
    error = (out.cpu().double() - expected).abs()
    assert (error <= (3 * RELATIVE[dtype] + TOLERANCE.get(kind, 0.0)) * expected.abs().max()).all()
    assert torch.equal(layer(rows, scores), out.to(dtype))


@pytest.mark.parametrize(
    ("quantization", "activation"), [("none", "silu"), ("none", CLAMPED_SWIGLU), ("int4", "silu")]
)
def test_a_row_keeps_its_bits_in_any_company(quantization: str, activation: str) -> None:
    mixture = Mixture(4, 2, normalize=True, activation=activation)
    layer = make_experts(
        weights_of(4, has_bias=activation == CLAMPED_SWIGLU),
        mixture,
        dtype=torch.bfloat16,
        quantization=quantization,
        group_size=16,
    )
    rows, scores = random(18, HIDDEN, dtype=torch.bfloat16), random(18, 4, dtype=torch.bfloat16, seed=1)
    scores[:, 1] = 4.0  # an expert has more rows than a tile
    together = layer(rows, scores)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(layer(rows[order], scores[order]), together[order])
    assert torch.equal(layer(rows[7:10], scores[7:10]), together[7:10])
    assert torch.equal(layer(rows[17:], scores[17:]), together[17:])


def test_one_expert_may_get_all_rows_and_others_none() -> None:
    mixture = Mixture(6, 1, normalize=True, activation="silu")
    weights = weights_of(6)
    layer = make_experts(weights, mixture, dtype=torch.float32)
    rows, scores = random(17, HIDDEN), random(17, 6, seed=1)
    scores[:, 4] = 10.0
    expected = ReferenceKernels().experts(weights[4:5], Mixture(1, 1, True, "silu"), dtype=torch.float32)
    # The weight is exactly 1, whatever the probability.
    torch.testing.assert_close(layer(rows, scores).cpu(), expected(rows.cpu(), torch.ones(17, 1)))


@pytest.mark.parametrize("num_experts", [1, 3])
def test_all_experts_may_be_chosen(num_experts: int) -> None:
    mixture = Mixture(num_experts, num_experts, normalize=False, activation="gelu")
    weights = weights_of(num_experts)
    rows, scores = random(2, HIDDEN), random(2, num_experts, seed=1)
    found = make_experts(weights, mixture, dtype=torch.float32)(rows, scores)
    torch.testing.assert_close(
        found.cpu().double(), computed(weights, mixture, rows, scores), rtol=1e-5, atol=1e-5
    )


def test_no_rows_are_no_work() -> None:
    layer = make_experts(weights_of(2), Mixture(2, 1, True, "silu"), dtype=torch.float32)
    assert layer(random(0, HIDDEN), random(0, 2)).shape == (0, HIDDEN)


@pytest.mark.parametrize("part", [16, 64])
@pytest.mark.parametrize("tile_rows", [1, 16])
def test_pairs_are_sorted_and_cut_into_tiles(
    tile_rows: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_routing, "_PARTS", (part,))
    monkeypatch.setattr(expert_routing, "_COUNTED", 32)
    monkeypatch.setattr(expert_routing, "_MAX_COMPARISONS", 256)
    scores = random(20, 11)
    scores[:, 3] = 5.0
    scores[:, 7] = -5.0
    routing = expert_routing.route(scores, Mixture(11, 4, True, "silu"), tile_rows)
    best = scores.cpu().sort(dim=1, descending=True, stable=True)
    chosen = best.indices[:, :4].flatten()
    assert torch.equal(routing.pairs.cpu().long(), chosen.sort(stable=True).indices)
    torch.testing.assert_close(routing.weights.cpu(), best.values[:, :4].softmax(1))
    used = [tile for tile in routing.tiles.cpu().t().tolist() if tile[2]]
    counts = torch.bincount(chosen, minlength=11).tolist()
    expected = [
        [expert, sum(counts[:expert]) + first, sum(counts[:expert]) + min(first + tile_rows, count)]
        for expert, count in enumerate(counts)
        for first in range(0, count, tile_rows)
    ]
    assert used == expected


@pytest.mark.parametrize("tile_rows", [1, 2, 3, 16])
def test_no_choice_needs_more_tiles(tile_rows: int) -> None:
    def needed(counts: list[int]) -> int:
        return sum(-(-count // tile_rows) for count in counts)

    for num_pairs in range(1, 12):
        splits = [
            [first, second, num_pairs - first - second]
            for first in range(num_pairs + 1)
            for second in range(num_pairs - first + 1)
        ]
        assert expert_routing.max_tiles(num_pairs, 3, tile_rows) == max(map(needed, splits))


def test_the_first_of_equal_experts_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [-200.0, 0.0, -300.0, -200.0, -250.0]], device=DEVICE)
    routing = expert_routing.route(scores, Mixture(5, 3, False, "silu"), 1)
    experts_of = routing.tiles[0][: len(routing.pairs)][routing.pairs.argsort()].view(2, 3)
    # Of the second row's probabilities, all but one are 0 in float32.
    assert experts_of.tolist() == [[1, 3, 0], [1, 0, 2]]


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    layer = make_experts(weights_of(5), Mixture(5, 2, True, "silu"), dtype=torch.float32)
    rows, scores = random(7, HIDDEN), random(7, 5, seed=1)
    expected = layer(rows, scores)
    rows[2, 5] = float("nan")
    scores[3, 1] = float("nan")
    scores[4] = float("-inf")
    scores[5, 2] = float("inf")
    found = layer(rows, scores)
    whole = [0, 1, 6]
    assert torch.equal(found[whole], expected[whole])
    assert found[2:6].isnan().all()


def in_any_order(weight: GroupedWeight, seed: int) -> GroupedWeight:
    order = torch.randperm(weight.values.shape[1], generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(weight, order=order)


@pytest.mark.parametrize("activations", ["int8", "bfloat16"])
def test_inputs_in_an_order_of_each_expert(activations: str) -> None:
    weights = [
        ExpertWeights(*([in_any_order(part, index) for part in matrix] for matrix in expert[:2]))  # type: ignore[arg-type]
        for index, expert in enumerate(weights_of(4, "int4"))
    ]
    weights[2] = weights_of(4, "int4")[2]  # in its own
    rows, scores = random(6, HIDDEN), random(6, 4, seed=1)
    options: dict[str, Any] = {"dtype": torch.float32, "int4_activations": activations}
    mixture = Mixture(4, 2, normalize=True, activation="silu")
    expected = ReferenceKernels().experts(weights, mixture, **options)(rows.cpu(), scores.cpu())
    found = make_experts(weights, mixture, **options)(rows, scores).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


class Launches:
    """Stands in for every kernel: counts launches, and computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module, name in (
            (expert_routing, "choose_experts_kernel"),
            (expert_routing, "sort_by_expert_kernel"),
            (expert_matrices, "expert_product_kernel"),
            (experts, "add_results_kernel"),
            (linear, "quantize_rows_kernel"),
        ):
            monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return lambda *args, **options: None


class Allocations(TorchDispatchMode):
    """Adds up the bytes of the tensors that are made, as if all of them were there at once."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.num_bytes += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize(("quantization", "num_launches"), [("none", 5), ("int8", 7)])
def test_the_host_asks_for_no_number_and_no_more_memory_than_is_planned(
    quantization: str, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(k: int) -> tuple[int, int]:
        """Return what a step of 9 rows takes, and what is planned for one of 9 million."""
        mixture = Mixture(40, k, normalize=True, activation="silu")
        layer = make_experts(weights_of(1) * 40, mixture, dtype=torch.bfloat16, quantization=quantization)
        launches = Launches(monkeypatch)
        with Allocations() as made:
            # Tensors of the meta device have no numbers: asking for one is an error.
            layer(*(torch.zeros(9, width, dtype=torch.bfloat16, device=META) for width in (HIDDEN, 40)))
        assert launches.count == num_launches
        model = dataclasses.replace(
            read_model_config(resolve_model("mini")),
            hidden_size=HIDDEN,
            layers=(LayerConfig((ExpertsConfig(num_experts=40, experts_per_token=k, inner_size=SIZE),)),),
        )
        scheduler = SchedulerConfig(max_num_batched_tokens=9_000_000)
        return made.num_bytes, activation_bytes(scheduler, model, "bfloat16", max_model_len=64, on_gpu=True)

    few, many = sizes(1), sizes(20)
    assert 0 < (many[0] - few[0]) * 1_000_000 <= many[1] - few[1]


def test_what_the_layer_cannot_take_is_refused() -> None:
    mixture = Mixture(2, 1, True, "silu")
    weights = weights_of(2)
    layer = make_experts(weights, mixture, dtype=torch.float32)
    rows, scores = random(3, HIDDEN), random(3, 2)
    with pytest.raises(ValueError, match=r"rows is \[3, 63\]; it must be \[3, 64\]"):
        layer(rows[:, 1:].contiguous(), scores)
    with pytest.raises(ValueError, match=r"scores is \[2, 2\]; it must be \[3, 2\]"):
        layer(rows, scores[:2])
    with pytest.raises(ValueError, match=r"out is \[3, 65\]"):
        layer(rows, scores, out=random(3, HIDDEN + 1))
    with pytest.raises(TypeError, match="float64"):
        layer(rows, scores.double())
    mixed = [weights[0], weights_of(2, "int8")[1]]
    with pytest.raises(ValueError, match=r"expert 1 .* one quantization"):
        make_experts(mixed, mixture, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"expert 1 .* all a bias or none"):
        make_experts([weights[0], weights_of(2, has_bias=True)[1]], mixture, dtype=torch.float32)
    with pytest.raises(ValueError, match="must give 1 for each"):
        make_experts(weights, Mixture(2, 1, True, "relu2", is_gated=False), dtype=torch.float32)
    narrow = [ExpertWeights(expert.gate_up, [torch.ones(HIDDEN, SIZE - 1)]) for expert in weights]
    with pytest.raises(ValueError, match="64 features to 96, and then 47 to 64"):
        make_experts(narrow, mixture, dtype=torch.float32)
    with pytest.raises(ValueError, match="shorter"):
        make_experts(weights[:1], mixture, dtype=torch.float32)
    for num_experts, k in ((2, 3), (2, 0), (1025, 1)):
        with pytest.raises(ValueError, match=f"{k} of {num_experts} experts"):
            make_experts([], Mixture(num_experts, k, True, "silu"), dtype=torch.float32)
