"""Quantized checkpoints: every kind gives the numbers that its description says, and runs as they would."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import (
    Steps,
    Tensors,
    awq,
    gptq,
    int_quantized,
    pack_quantized,
    random_steps,
    write_quantized,
)
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from paged_harness import generate, random_prompts
from quire.errors import ConfigError, ModelError
from quire.kernels import native_output_bits
from quire.kernels.layers.act_order import ReorderedLinear
from quire.kernels.layers.weights import GroupedWeight, Int8Weight, Weight, dequantize
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.shard import Shard
from quire.models.weights import WeightSource, weight_bytes, weight_specs

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
PACKED = {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}


@dataclasses.dataclass
class Kind:
    """A kind of checkpoint, and what its matrices must be read as."""

    config: dict[str, Any]
    encode: Callable[[Steps], Tensors]
    read_as: type
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    shuffled: bool | str = False

    def write(self, path: Path, family: str = "llama", **shape: int) -> tuple[Path, Path]:
        """Return directories of the quantized checkpoint and of its float32 twin."""
        make_checkpoint(family, path, **SHAPE | shape)
        draw = functools.partial(
            random_steps,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            shuffled=self.shuffled,
        )
        return path, write_quantized(path, self.config, draw, self.encode)


def _compressed(**kwargs: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": kwargs}, "ignore": ["lm_head"]}


def _gptq(bits: int = 4, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq", **changes}


PACK4 = functools.partial(pack_quantized, bits=4)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
SYMMETRIC = functools.partial(PACK4, symmetric=True)
ASYMMETRIC = functools.partial(PACK4, symmetric=False)
PACK8 = functools.partial(pack_quantized, bits=8, symmetric=True)


def _packed(encode: Callable[[Steps], Tensors], group_size: int, **kind: Any) -> Kind:
    strategy = {"strategy": "group", "group_size": group_size} if group_size > 0 else {"strategy": "channel"}
    weights = {"num_bits": kind.get("bits", 4), "type": "int", **strategy}
    weights["symmetric"] = kind.get("symmetric", False)
    config = _compressed(format="pack-quantized", weights=weights)
    return Kind(config, encode, **{"read_as": GroupedWeight} | kind, group_size=group_size)


def _gptq_kind(group_size: int, *, bits: int = 4, version: int = 1, **kind: Any) -> Kind:
    config = _gptq(
        bits,
        group_size=group_size,
        checkpoint_format="gptq" if version == 1 else "gptq_v2",
        desc_act="shuffled" in kind,
    )
    encode = functools.partial(gptq, bits=bits, version=version)
    return Kind(config, encode, **{"read_as": GroupedWeight} | kind, bits=bits, group_size=group_size)


KINDS = {
    "pack-quantized, group 32": _packed(SYMMETRIC, 32, symmetric=True),
    "pack-quantized, group 128": _packed(SYMMETRIC, 128, symmetric=True),
    "pack-quantized, rows": _packed(SYMMETRIC, -1, symmetric=True),
    "pack-quantized, with zeros": _packed(ASYMMETRIC, 64),
    "pack-quantized, 8 bits": _packed(PACK8, -1, bits=8, symmetric=True, read_as=Int8Weight),
    "int-quantized": Kind(
        _compressed(format="int-quantized", weights={"num_bits": 8, "type": "int", "strategy": "channel"}),
        int_quantized,
        Int8Weight,
        bits=8,
        group_size=-1,
        symmetric=True,
    ),
    "gptq": _gptq_kind(32),
    "gptq, group 64": _gptq_kind(64),
    "gptq, rows": _gptq_kind(-1, symmetric=True),
    "gptq, version 2": _gptq_kind(32, version=2),
    "gptq, 8 bits": _gptq_kind(32, bits=8),
    "gptq, 8 bits, rows": _gptq_kind(-1, bits=8, symmetric=True, read_as=Int8Weight),
    "gptq, desc_act": _gptq_kind(32, shuffled=True),
    "gptq, desc_act, 8 bits": _gptq_kind(64, bits=8, shuffled=True),
    "gptq, desc_act, orders that differ": _gptq_kind(32, shuffled="each"),
    "awq": Kind(AWQ, awq, GroupedWeight),
    "awq, group 128": Kind(AWQ | {"group_size": 128}, awq, GroupedWeight, group_size=128),
}


def _encode_mixed(steps: Steps) -> Tensors:
    """Pack matrices of 256 inputs by row, in 8 bits, and others as they are, in 4."""
    if steps.values.shape[1] < 256:
        return SYMMETRIC(steps)
    return PACK8(dataclasses.replace(steps, scales=steps.scales[:, :1]))


MIXED = Kind(
    KINDS["pack-quantized, group 32"].config, _encode_mixed, GroupedWeight, group_size=32, symmetric=True
)


def _matrices(path: Path) -> Iterator[tuple[WeightSource, Weight]]:
    config = read_model_config(path)
    specs = list(weight_specs(config))
    with Checkpoint(path) as checkpoint:
        checkpoint.check_names(specs, config)
        for spec in specs:
            for source in spec.sources:
                yield source, checkpoint.weight(source)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_weight_is_what_the_checkpoint_stands_for(kind: Kind, tmp_path: Path) -> None:
    path, twin = kind.write(tmp_path / "model")
    wanted = load_file(twin / "model.safetensors")
    for source, weight in _matrices(path):
        is_quantized = source.name.endswith("_proj.weight")
        assert isinstance(weight, kind.read_as if is_quantized else torch.Tensor)
        assert torch.equal(dequantize(weight), wanted[source.name])


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized, group 32", "int-quantized"])
def test_biases_that_the_model_has_are_added(name: str, tmp_path: Path) -> None:
    """As in Qwen2."""
    path, twin = KINDS[name].write(tmp_path / "model", family="qwen2")
    wanted = load_file(twin / "model.safetensors")
    biases = [(source.name, weight) for source, weight in _matrices(path) if source.name.endswith(".bias")]
    assert len(biases) == 3 * 2
    assert all(torch.equal(dequantize(weight), wanted[stored]) for stored, weight in biases)
    products = _logits(twin)
    assert (_logits(path) - products).norm() / products.norm() < 0.05


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_rank_holds_its_part_of_every_weight(kind: Kind, tmp_path: Path) -> None:
    path, twin = kind.write(tmp_path / "model")
    wanted = load_file(twin / "model.safetensors")
    with Checkpoint(path) as checkpoint:
        for spec in weight_specs(read_model_config(path), Shard(1, 2)):
            for source in spec.sources:
                expected = wanted[source.name]
                if source.ranges is not None:
                    held = torch.tensor([number for part in source.ranges for number in part])
                    expected = expected.index_select(source.axis, held)
                assert torch.equal(dequantize(checkpoint.weight(source)), expected)


def test_a_part_that_cuts_groups_is_refused(tmp_path: Path) -> None:
    path, _ = KINDS["gptq, group 64"].write(tmp_path / "model")
    refused = WeightSource("model.layers.0.mlp.down_proj.weight", (128, 256), 1, (range(40, 104),))
    with (
        Checkpoint(path) as checkpoint,
        pytest.raises(ConfigError, match=r"tensor_parallel_size does not allow for .*down_proj.*40 and 104"),
    ):
        checkpoint.weight(refused)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_memory_that_the_weights_will_take_is_known_from_the_config(kind: Kind, tmp_path: Path) -> None:
    path, _ = kind.write(tmp_path / "model")
    config = read_model_config(path)
    in_groups = "int4" if kind.bits == 4 else "grouped_int8"
    form = {GroupedWeight: in_groups, Int8Weight: "int8", torch.Tensor: "none"}[kind.read_as]
    assert config.stored_quantization == form
    groups = {weight.group_size for _, weight in _matrices(path) if isinstance(weight, GroupedWeight)}
    assert groups in (set(), {config.stored_group_size})
    planned, plain = (
        weight_bytes(shape, "float32", "none", 128)
        for shape in (config, dataclasses.replace(config, stored_quantization="none"))
    )
    assert (planned < plain) == (form != "none")


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "kind",
    [
        _gptq_kind(32),
        _gptq_kind(8),
        _gptq_kind(24, bits=8),
        _gptq_kind(48),
        _gptq_kind(-1, symmetric=True),
        dataclasses.replace(_gptq_kind(-1, bits=8), config=_gptq(8, group_size=-1, sym=False)),
        _packed(SYMMETRIC, 8, symmetric=True),
        _packed(ASYMMETRIC, -1),
        _packed(functools.partial(pack_quantized, bits=8, symmetric=False), -1, bits=8),
    ],
    ids=lambda kind: kind.config,
)
def test_groups_that_kernels_do_not_have_are_planned_as_they_are_held(
    kind: Kind, quantization: str, tmp_path: Path, packed_bytes: list[int]
) -> None:
    """Rows of 192 inputs are 3 groups of 64, not of 128."""
    path, _ = kind.write(tmp_path / "model", hidden_size=192, intermediate_size=576, head_dim=48)
    config = read_model_config(path)
    options = WeightOptions("bfloat16", quantization, group_size=64, kernels="native")
    embedding = len(load_decoder(path, config, options=options).embedding) * config.hidden_size * 2
    planned = weight_bytes(config, "bfloat16", quantization, 64, output_bits=native_output_bits())
    assert planned == pytest.approx(sum(packed_bytes) + embedding, rel=0.01)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("floats", ["layers.1.", "self_attn", "q_proj", "mlp"])
@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized, with zeros", "int-quantized", "mixed"])
def test_what_is_not_quantized_is_planned_as_it_is_held(
    name: str, floats: str, quantization: str, tmp_path: Path, packed_bytes: list[int]
) -> None:
    """As lists of exceptions say; "mixed": 4 bits in groups, and 8 bits by row where inputs are 256."""
    path, twin = MIXED.write(tmp_path / "model") if name == "mixed" else KINDS[name].write(tmp_path / "model")
    wanted = load_file(twin / "model.safetensors")

    def put_floats_back(weights: Tensors) -> None:
        for stored in [stored for stored in weights if floats in stored and "_proj." in stored]:
            del weights[stored]
        weights.update({stored: weight for stored, weight in wanted.items() if floats in stored})

    _change(path, put_floats_back)
    if floats == "mlp":
        _shard(path)
    config = read_model_config(path)
    assert config.stored_quantization != "none"
    options = WeightOptions("bfloat16", quantization, group_size=64, kernels="native")
    embedding = len(load_decoder(path, config, options=options).embedding) * config.hidden_size * 2
    planned = weight_bytes(config, "bfloat16", quantization, 64, output_bits=native_output_bits())
    assert planned == pytest.approx(sum(packed_bytes) + embedding, rel=0.02)


def _shard(path: Path) -> None:
    """Divide the one file of a checkpoint in two."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_description_alone_is_planned_by_what_it_says(tmp_path: Path) -> None:
    path, _ = KINDS["gptq"].write(tmp_path / "model")
    wanted = read_model_config(path)
    (path / "model.safetensors").unlink()
    assert read_model_config(path) == wanted


@pytest.mark.parametrize(("group_size", "form"), [(32, "grouped_int8"), (-1, "int8")])
def test_numbers_of_4_bits_that_are_not_packed_take_8(group_size: int, form: str, tmp_path: Path) -> None:
    strategy = {"strategy": "group", "group_size": 32} if group_size > 0 else {"strategy": "channel"}
    weights = {"num_bits": 4, "type": "int", **strategy}
    config = _compressed(weights=weights) | {"format": "naive-quantized"}
    kind = dataclasses.replace(KINDS["int-quantized"], config=config, group_size=group_size)
    path, _ = kind.write(tmp_path / "model")
    kept = next(weight for source, weight in _matrices(path) if source.name.endswith("_proj.weight"))
    assert isinstance(kept, Int8Weight) or (isinstance(kept, GroupedWeight) and kept.bits == 8)
    assert read_model_config(path).stored_quantization == form


def _logits(path: Path, **options: Any) -> torch.Tensor:
    config = read_model_config(path)
    decoder = load_decoder(
        path, config, options=WeightOptions(dtype="float32", kernels="reference", **options)
    )
    (generated,) = generate(decoder, random_prompts([40], vocab_size=config.vocab_size), num_new=1)
    return generated.logits[0]


# Rows are rounded to bfloat16 before products with 4 bits, and to 8 bits before those with 8.
BOUNDS = {GroupedWeight: 0.05, Int8Weight: 0.05, torch.Tensor: 1e-5}


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "name",
    [
        "pack-quantized, rows",
        "int-quantized",
        "gptq",
        "gptq, desc_act",
        "gptq, desc_act, 8 bits",
        "gptq, desc_act, orders that differ",
        "awq",
    ],
)
def test_the_model_computes_with_these_weights(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    path, twin = kind.write(tmp_path / "model")
    wanted = _logits(twin)
    error = (_logits(path) - wanted).norm() / wanted.norm()
    assert error < BOUNDS[kind.read_as]


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_inputs_in_another_order_give_the_products_of_the_same_matrix(kernels: str, tmp_path: Path) -> None:
    """Rows 300: more than are put in order at once."""
    path, twin = KINDS["gptq, desc_act"].write(tmp_path / "model")
    wanted = load_file(twin / "model.safetensors")
    options = WeightOptions(dtype="float32", kernels=kernels, int4_activations="bfloat16")
    attention, mlp = load_decoder(path, read_model_config(path), options=options).layers[1]
    for linear, names in (
        (attention.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
        (attention.output, ("self_attn.o",)),
        (mlp.gate_up.gate_up, ("mlp.gate", "mlp.up")),
        (mlp.down, ("mlp.down",)),
    ):
        assert isinstance(linear, ReorderedLinear)
        matrix = torch.cat([wanted[f"model.layers.1.{name}_proj.weight"] for name in names])
        rows = torch.randn(300, linear.in_features).bfloat16().float()
        torch.testing.assert_close(linear(rows), rows @ matrix.T, rtol=0.02, atol=0.02)
        alone = torch.cat([linear(row[None]) for row in rows[:3]])
        assert torch.equal(alone, linear(rows)[:3])


def test_a_scale_for_the_whole_matrix_is_one_for_each_row(tmp_path: Path) -> None:
    def encode(steps: Steps) -> Tensors:
        return int_quantized(steps) | {"weight_scale": torch.tensor([0.5])}

    kind = dataclasses.replace(KINDS["int-quantized"], encode=encode)
    path, _ = kind.write(tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    for source, weight in _matrices(path):
        if source.name.endswith("_proj.weight"):
            assert torch.equal(dequantize(weight), stored[source.name].float() * 0.5)


def test_zeros_off_the_middle_make_int8_a_float(tmp_path: Path) -> None:
    def encode(steps: Steps) -> Tensors:
        zeros = torch.full((len(steps.values), 1), 3, dtype=torch.int8)
        return int_quantized(steps) | {"weight_zero_point": zeros}

    kind = dataclasses.replace(KINDS["int-quantized"], encode=encode)
    path, _ = kind.write(tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    for source, weight in _matrices(path):
        if source.name.endswith("_proj.weight"):
            scales = stored[f"{source.name.removesuffix('.weight')}.weight_scale"].float()
            assert torch.equal(dequantize(weight), (stored[source.name].float() - 3) * scales)


def _change(path: Path, change: Callable[[Tensors], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


@pytest.fixture
def gptq_model(tmp_path: Path) -> Path:
    return KINDS["gptq"].write(tmp_path / "model")[0]


STEM = "model.layers.1.mlp.up_proj"


def test_biases_of_zeros_are_ignored(gptq_model: Path) -> None:
    _change(gptq_model, lambda weights: weights.update({f"{STEM}.bias": torch.zeros(256)}))
    assert sum(1 for _ in _matrices(gptq_model)) > 0


def test_other_biases_are_not(gptq_model: Path) -> None:
    _change(gptq_model, lambda weights: weights.update({f"{STEM}.bias": torch.ones(256)}))
    with pytest.raises(ModelError, match=r"holds model\.layers\.1\.mlp\.up_proj\.bias"):
        list(_matrices(gptq_model))


def test_a_missing_part_is_named(gptq_model: Path) -> None:
    _change(gptq_model, lambda weights: weights.pop(f"{STEM}.qzeros"))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.qzeros"):
        list(_matrices(gptq_model))


def _with_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((path / "config.json").read_text())
    change(values["quantization_config"])
    (path / "config.json").write_text(json.dumps(values))


def _of_weights(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["weights"].update(changes)

    return change


ORDERED: dict[str, Any] = {"desc_act": True}
PLAIN_GROUPS = dataclasses.replace(
    KINDS["int-quantized"],
    config=_compressed(
        format="int-quantized", weights={"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}
    ),
    group_size=32,
)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("kind", "change", "missing"),
    [
        (KINDS["gptq"], lambda config: config.update(ORDERED), "g_idx"),
        (KINDS["pack-quantized, group 32"], _of_weights(actorder="group"), "weight_g_idx"),
        (KINDS["pack-quantized, group 32"], _of_weights(actorder=True), "weight_g_idx"),
        (KINDS["pack-quantized, group 32"], _of_weights(symmetric=False), "weight_zero_point"),
        (KINDS["pack-quantized, rows"], _of_weights(symmetric=False), "weight_zero_point"),
        (PLAIN_GROUPS, _of_weights(symmetric=False), "weight_zero_point"),
    ],
)
def test_what_the_config_promises_must_be_there(
    kind: Kind, change: Callable[[dict[str, Any]], None], missing: str, tmp_path: Path
) -> None:
    """Without groups or zero points, the numbers would be others than those that were meant."""
    path, _ = kind.write(tmp_path / "model")
    _change(path, lambda weights: weights.pop(f"{STEM}.{missing}", None))
    assert sum(1 for _ in _matrices(path)) > 0
    _with_config(path, change)
    with pytest.raises(ModelError, match=rf"lacks model\.layers\.\d\..*_proj\.{missing}"):
        list(_matrices(path))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (KINDS["gptq"], lambda config: config.update(desc_act=False)),
        (KINDS["gptq"], lambda config: config.update(ORDERED, static_groups=True)),
        (KINDS["gptq, rows"], lambda config: config.update(ORDERED)),
        (KINDS["pack-quantized, group 32"], _of_weights(actorder="weight", symmetric=True)),
        (KINDS["pack-quantized, group 32"], _of_weights(actorder="static")),
        (KINDS["pack-quantized, group 32"], _of_weights(actorder=None, symmetric=None)),
        (KINDS["pack-quantized, rows"], _of_weights(actorder="group")),
    ],
)
def test_groups_of_runs_of_inputs_need_not_be_stored(
    kind: Kind, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path, twin = kind.write(tmp_path / "model")
    _change(path, lambda weights: [weights.pop(name) for name in list(weights) if name.endswith("g_idx")])
    _with_config(path, change)
    wanted = load_file(twin / "model.safetensors")
    for source, weight in _matrices(path):
        assert torch.equal(dequantize(weight), wanted[source.name])


@pytest.mark.parametrize(
    ("last", "shape", "message"),
    [
        ("scales", (4, 255), r"scales has shape \[4, 255\]; \[4, 256\] is needed"),
        ("qweight", (16, 255), r"qweight has shape"),
        ("qweight", (15, 256), r"neither 4 nor 8 bits"),
        ("g_idx", (127,), r"127 inputs' groups do not fit 128 inputs and 4 groups"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    gptq_model: Path, last: str, shape: tuple[int, int], message: str
) -> None:
    def change(weights: Tensors) -> None:
        name = f"{STEM}.{last}"
        weights[name] = torch.zeros(shape, dtype=weights[name].dtype)

    _change(gptq_model, change)
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.up_proj in .*{message}"):
        list(_matrices(gptq_model))


def test_groups_that_do_not_exist_are_refused(gptq_model: Path) -> None:
    wrong = torch.full((128,), 4, dtype=torch.int32)
    _change(gptq_model, lambda weights: weights.update({f"{STEM}.g_idx": wrong}))
    with pytest.raises(ModelError, match="groups do not fit"):
        list(_matrices(gptq_model))


def test_packed_numbers_of_another_type_are_refused(gptq_model: Path) -> None:
    _change(gptq_model, lambda weights: weights.update({f"{STEM}.qweight": torch.zeros(16, 256)}))
    with pytest.raises(ModelError, match=r"stored as torch\.float32; int32 is needed"):
        list(_matrices(gptq_model))


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized, group 32", "int-quantized"])
@pytest.mark.parametrize(
    ("number", "dtype", "message"),
    [
        (torch.nan, torch.float16, "invalid scales: infinite or NaN"),
        (-torch.inf, torch.float32, "invalid scales: infinite or NaN"),
        (127, torch.uint8, r"stored as torch\.uint8; a floating-point type is needed"),
    ],
)
def test_scales_are_finite_numbers(
    name: str, number: float, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    path, _ = KINDS[name].write(tmp_path / "model")

    def change(weights: Tensors) -> None:
        (last,) = (last for last in ("scales", "weight_scale") if f"{STEM}.{last}" in weights)
        scales = weights[f"{STEM}.{last}"] = weights[f"{STEM}.{last}"].to(dtype)
        scales[-1, -1] = number

    _change(path, change)
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.up_proj in .*{message}"):
        list(_matrices(path))


def test_zero_points_that_kernels_cannot_hold_are_refused(tmp_path: Path) -> None:
    path, _ = KINDS["int-quantized"].write(tmp_path / "model")
    zeros = torch.full((256, 1), 1 << 20)
    _change(path, lambda weights: weights.update({f"{STEM}.weight_zero_point": zeros}))
    with pytest.raises(ModelError, match="zero points beyond 60000"):
        list(_matrices(path))


@pytest.mark.parametrize("shape", [(32, 1), (33, 2), (64,)])
def test_zeros_for_other_groups_than_scales_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path, _ = KINDS["pack-quantized, with zeros"].write(tmp_path / "model")
    zeros = torch.zeros(shape, dtype=torch.int32)
    _change(path, lambda weights: weights.update({f"{STEM}.weight_zero_point": zeros}))
    with pytest.raises(ModelError, match=rf"has shape {re.escape(str(list(shape)))}; \[32, 2\] is needed"):
        list(_matrices(path))


RUNS = torch.arange(128) // 32


@pytest.mark.parametrize("groups", [RUNS, torch.full_like(RUNS, -1)], ids=["runs", "never set"])
def test_groups_that_were_never_set_are_runs_of_inputs(groups: torch.Tensor, tmp_path: Path) -> None:
    path, twin = KINDS["pack-quantized, group 32"].write(tmp_path / "model")
    _change(path, lambda weights: weights.update({f"{STEM}.weight_g_idx": groups.int()}))
    weight = next(weight for source, weight in _matrices(path) if source.name == f"{STEM}.weight")
    assert torch.equal(dequantize(weight), load_file(twin / "model.safetensors")[f"{STEM}.weight"])


def test_another_weight_shape_is_refused(tmp_path: Path) -> None:
    path, _ = KINDS["pack-quantized, with zeros"].write(tmp_path / "model")
    wrong = torch.full((64, 4096), 7)
    _change(path, lambda weights: weights.update({f"{STEM}.weight_shape": wrong}))
    with pytest.raises(ModelError, match=r"its weight_shape is \[7, 7, 7\]; \[256, 128\] is needed"):
        list(_matrices(path))


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    path, _ = KINDS["pack-quantized, group 32"].write(tmp_path / "model")
    _change(path, lambda weights: weights.update({f"{STEM}.weight_scale": torch.ones(256, 3)}))
    with pytest.raises(ModelError, match=r"128 inputs cannot be divided evenly among 3 groups"):
        list(_matrices(path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"quant_method": "hqq"},
            "hqq.*it supports compressed-tensors, fp8, gptq, awq, mxfp4, bitsandbytes and GGUF",
        ),
        (_gptq(3), "GPTQ and have 3 bits.*supported: 4 or 8"),
        (_gptq(checkpoint_format="marlin"), "checkpoint_format marlin.*gptq, gptq_v2"),
        (AWQ | {"version": "gemv"}, "AWQ and have the version gemv.*gemm"),
        (AWQ | {"zero_point": False}, "no zero points"),
        (
            _compressed(format="mxfp8-quantized", weights={}),
            "format mxfp8-quantized.*int-quantized",
        ),
        (
            _compressed(format="nvfp4-pack-quantized", weights={}),
            "int of 8 bits.*of 4 in mxfp4-pack-quantized and nvfp4-pack-quantized",
        ),
        (_compressed(**PACKED | {"weights": {"type": "float", "num_bits": 4}}), "float of 4 bits"),
        (_compressed(**PACKED | {"weights": {"strategy": "block"}}), "a scale for each block"),
        (_compressed(**PACKED) | {"kv_cache_scheme": {"num_bits": 8}}, "a quantized KV cache"),
        (_compressed(**PACKED) | {"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
        (_compressed(**PACKED) | {"transform_config": {"config_groups": {"u": {}}}}, "transforms"),
    ],
)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)
