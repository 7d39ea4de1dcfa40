"""Checkpoints in float8: what their tensors stand for, and the dequantized model in `transformers`."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from paged_harness import generate, random_prompts
from quire.config import EngineConfig
from quire.engine.memory.plan import plan_memory
from quire.errors import ConfigError, ModelError
from quire.kernels import native_output_bits
from quire.kernels.layers.weights import Float8Weight, Weight, dequantize
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.checkpoints.quantized.description import describe_quantization
from quire.models.shard import Shard
from quire.models.weights import WeightSource, weight_bytes, weight_specs

Tensors = dict[str, torch.Tensor]
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 32}
STEM = "model.layers.1.mlp.up_proj"


def _draw(shape: torch.Size, scales: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random float8 numbers, and so many scales that make of them about unit gain."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    return values, (torch.rand(scales, generator=generator) + 0.5) / (100 * shape[1] ** 0.5)


def _in_blocks(
    shape: torch.Size, seed: int, *, block: tuple[int, int], scale: str
) -> tuple[Tensors, torch.Tensor]:
    """Return the stored tensors by the last words of their names, and the numbers they stand for."""
    rows, inputs = (torch.arange(size) // of_one for size, of_one in zip(shape, block, strict=True))
    values, scales = _draw(shape, (int(rows[-1]) + 1, int(inputs[-1]) + 1), seed)
    scales = scales.bfloat16()
    stored = {"weight": values, scale: scales}
    return stored, values.float() * scales.float()[rows][:, inputs]


def _by_row(shape: torch.Size, seed: int) -> tuple[Tensors, torch.Tensor]:
    values, scales = _draw(shape, (shape[0], 1), seed)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def _whole(shape: torch.Size, seed: int, *, scale: str, activations: str) -> tuple[Tensors, torch.Tensor]:
    values, scales = _draw(shape, (1, 1), seed)
    stored = {"weight": values, scale: scales.reshape(()), activations: torch.tensor(0.01)}
    return stored, values.float() * scales


def _compressed(**weights: Any) -> dict[str, Any]:
    described = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    group = {"weights": described, "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


@dataclasses.dataclass
class Kind:
    """A kind of checkpoint: its description, and what makes the tensors of a matrix."""

    config: dict[str, Any]
    encode: Callable[[torch.Size, int], tuple[Tensors, torch.Tensor]]
    held_as: str = "fp8"

    def write(self, path: Path, family: str = "qwen3", **shape: Any) -> Path:
        """Write a checkpoint; return the directory of its float32 twin."""
        make_checkpoint(family, path, **SHAPE | shape)
        twin = path.with_name(path.name + "-floats")
        shutil.copytree(path, twin)
        weights = load_file(path / "model.safetensors")
        floats = dict(weights)
        for seed, name in enumerate(sorted(weights)):
            if name.endswith("_proj.weight"):
                stored, floats[name] = self.encode(weights.pop(name).shape, seed)
                weights |= {f"{name.removesuffix('.weight')}.{last}": part for last, part in stored.items()}
        save_file(weights, path / "model.safetensors")
        save_file(floats, twin / "model.safetensors")
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(values | {"quantization_config": self.config}))
        return twin


DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCK = (128, 128)
IN_BLOCKS = functools.partial(_in_blocks, block=BLOCK)
KINDS = {
    "fp8, blocks": Kind(
        DYNAMIC | {"fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        functools.partial(IN_BLOCKS, scale="weight_scale_inv"),
        "fp8_blocks",
    ),
    "fp8, matrices": Kind(
        STATIC | {"weight_block_size": None},
        functools.partial(_whole, scale="weight_scale_inv", activations="activation_scale"),
    ),
    "AutoFP8": Kind(
        STATIC | {"ignored_layers": ["lm_head"]},
        functools.partial(_whole, scale="weight_scale", activations="input_scale"),
    ),
    "compressed-tensors, rows": Kind(_compressed(strategy="channel"), _by_row),
    "compressed-tensors, matrices": Kind(
        _compressed(strategy="tensor"),
        functools.partial(_whole, scale="weight_scale", activations="input_scale"),
    ),
    "compressed-tensors, blocks": Kind(
        _compressed(strategy="block", block_structure=[128, 128]),
        functools.partial(IN_BLOCKS, scale="weight_scale"),
        "fp8_blocks",
    ),
}


def _by_layer(*, attention: Kind, mlp: Kind) -> Kind:
    """Return checkpoints of two groups, told apart by size: only matrices of the MLP have 320 features."""
    (first,), (second,) = (kind.config["config_groups"].values() for kind in (attention, mlp))

    def encode(shape: torch.Size, seed: int) -> tuple[Tensors, torch.Tensor]:
        return (mlp if 320 in shape else attention).encode(shape, seed)

    groups = {
        "attention": first | {"targets": ["re:.*self_attn.*"]},
        "mlp": second | {"targets": ["re:.*mlp.*"]},
        "of activations": {
            "targets": ["re:.*k_proj"],
            "output_activations": {"num_bits": 8},
            "weights": None,
        },
    }
    return Kind(attention.config | {"config_groups": groups}, encode)


ROWS, MATRICES, BLOCKS = (KINDS[f"compressed-tensors, {name}"] for name in ("rows", "matrices", "blocks"))
MIXED = {
    "rows, then blocks": _by_layer(attention=ROWS, mlp=BLOCKS),
    "blocks, then rows": _by_layer(attention=BLOCKS, mlp=ROWS),
    "blocks, then matrices": _by_layer(attention=BLOCKS, mlp=MATRICES),
}
any_kind = pytest.mark.parametrize("kind", (KINDS | MIXED).values(), ids=KINDS | MIXED)
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _matrices(path: Path, shard: Shard | None = None) -> Iterator[tuple[WeightSource, Weight]]:
    config = read_model_config(path)
    with Checkpoint(path) as checkpoint:
        checkpoint.check_names(list(weight_specs(config)), config)
        for spec in weight_specs(config, shard or Shard()):
            for source in spec.sources:
                yield source, checkpoint.weight(source)


@pytest.mark.formats
@pytest.mark.first_case
@any_kind
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_weight_is_what_the_checkpoint_stands_for(kind: Kind, size: int, tmp_path: Path) -> None:
    path = tmp_path / "model"
    wanted = load_file(kind.write(path) / "model.safetensors")
    for rank in range(size):
        for source, weight in _matrices(path, Shard(rank, size)):
            assert isinstance(weight, Float8Weight) == source.name.endswith("_proj.weight")
            expected = wanted[source.name]
            if source.ranges is not None:
                held = torch.tensor([number for part in source.ranges for number in part])
                expected = expected.index_select(source.axis, held)
            assert torch.equal(dequantize(weight), expected)


def _logits(path: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    loaded = load_decoder(path, read_model_config(path), options=WeightOptions(dtype="float32", **options))
    (generated,) = generate(loaded, [prompt], num_new=1)
    return generated.logits[0]


def _logits_of_transformers(path: Path, prompt: list[int]) -> torch.Tensor:
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits
    return logits[0, -1]


def _prompt(path: Path) -> list[int]:
    (prompt,) = random_prompts([40], vocab_size=read_model_config(path).vocab_size)
    return prompt


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.formats
@pytest.mark.first_case
@any_kind
def test_the_model_computes_what_transformers_does_with_the_dequantized_one(
    kind: Kind, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    twin = kind.write(path)
    prompt = _prompt(path)
    wanted = _logits_of_transformers(twin, prompt)
    for kernels in ("native", "reference"):
        assert _relative(_logits(path, prompt, kernels=kernels), wanted) < 1e-5


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_on_cpus_it_is_quantized_as_the_floats_would_be(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    twin = KINDS["fp8, blocks"].write(path)
    prompt = _prompt(path)
    found, expected = (
        _logits(each, prompt, quantization=quantization, group_size=32) for each in (path, twin)
    )
    assert torch.equal(found, expected)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", ["fp8, blocks", "compressed-tensors, rows"])
def test_in_triton_products_are_in_float8(name: str, tmp_path: Path) -> None:
    """Rows have 4 significant bits there, so logits are near those of the floats, and not equal."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path / "model"
    twin = KINDS[name].write(path, num_hidden_layers=1)
    prompt = _prompt(path)[:10]
    wanted = _logits(twin, prompt, kernels="reference")
    assert 1e-3 < _relative(_logits(path, prompt, kernels="triton"), wanted) < 0.1


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("kernels", "bound"), [("native", 1e-5), ("triton", 0.1)])
def test_experts_in_float8(kernels: str, bound: float, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shape = {"num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": 160}
    twin = KINDS["fp8, blocks"].write(path, "qwen3_moe", **shape)
    prompt = _prompt(path)[:6]
    wanted = _logits(twin, prompt, kernels="reference")
    assert _relative(_logits(path, prompt, kernels=kernels), wanted) < bound


@pytest.mark.formats
@pytest.mark.first_case
@each_kind
def test_the_memory_plan_counts_what_is_held(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model"
    kind.write(path)
    config = read_model_config(path)
    assert config.stored_quantization == kind.held_as
    plain = dataclasses.replace(config, stored_quantization="none")
    for quantization in ("none", "int8", "int4"):
        on_cpu, of_floats = (weight_bytes(each, "bfloat16", quantization, 64) for each in (config, plain))
        assert on_cpu == of_floats
        plan = plan_memory(
            EngineConfig(device="cpu", quantization=quantization, quantization_group_size=64), config
        )
        assert (plan.weight_bytes, plan.quantization) == (
            weight_bytes(config, config.dtype, quantization, 64, output_bits=native_output_bits()),
            quantization,
        )
    in_triton = plan_memory(EngineConfig(device="cpu", kernels="triton"), config)
    assert in_triton.quantization == kind.held_as
    held = sum(
        weight.nbytes
        if isinstance(weight, torch.Tensor)
        else weight.values.nbytes
        + 4 * (len(weight.values) if kind.held_as == "fp8" else weight.scales.numel())
        for source, weight in _matrices(path)
        if isinstance(weight, torch.Tensor | Float8Weight) and source.name != "model.embed_tokens.weight"
    )
    embedding = config.vocab_size * config.hidden_size * 4
    assert in_triton.weight_bytes in (held, held + embedding)


@pytest.mark.parametrize("kind", MIXED.values(), ids=MIXED)
def test_where_groups_differ_no_more_is_held_than_planned(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model"
    kind.write(path)
    config = read_model_config(path)
    planned = plan_memory(EngineConfig(device="cpu", kernels="triton"), config).weight_bytes
    held = sum(
        weight.nbytes
        if isinstance(weight, torch.Tensor)
        else weight.values.nbytes
        + 4 * (weight.scales.numel() if weight.scales.shape[1] > 1 else len(weight.values))
        for _, weight in _matrices(path)
        if isinstance(weight, torch.Tensor | Float8Weight)
    )
    assert held <= planned < 1.01 * held


def _change(path: Path, change: Callable[[Tensors], None]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    KINDS["fp8, blocks"].write(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_scale_inv", torch.ones(2, 2), r"weight_scale_inv has shape \[2, 2\]; \[3, 2\] is needed"),
        ("weight_scale_inv", torch.tensor(1.0), r"weight_scale_inv has shape \[\]; \[3, 2\] is needed"),
        ("weight_scale_inv", torch.full((3, 2), torch.nan), "invalid scales: infinite or NaN"),
        ("weight_scale_inv", torch.full((3, 2), torch.inf), "invalid scales: infinite or NaN"),
        ("weight_scale_inv", torch.full((3, 2), -1.0), "invalid scales: negative"),
        (
            "weight_scale_inv",
            torch.full((3, 2), 127).byte(),
            r"torch\.uint8; a floating-point type is needed",
        ),
        ("weight", torch.zeros(320, 192), r"stored as torch\.float32; only float8_e4m3fn"),
        ("weight", torch.zeros(320, 192).to(torch.float8_e5m2), "float8_e5m2; only float8_e4m3fn"),
        ("weight", torch.zeros(320, 191).to(torch.float8_e4m3fn), r"weight has shape \[320, 191\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    model: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    _change(model, lambda weights: weights.update({f"{STEM}.{name}": tensor}))
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.mlp\.up_proj in .*{message}"):
        list(_matrices(model))


def test_a_missing_scale_is_named(model: Path) -> None:
    _change(model, lambda weights: weights.pop(f"{STEM}.weight_scale_inv"))
    with pytest.raises(ModelError, match=rf"no scale for it; {STEM}\.weight_scale_inv or \.weight_scale is"):
        list(_matrices(model))


def test_a_part_that_cuts_blocks_is_refused(model: Path) -> None:
    refused = WeightSource("model.layers.0.mlp.down_proj.weight", (192, 320), 1, (range(40, 320),))
    with (
        Checkpoint(model) as checkpoint,
        pytest.raises(ConfigError, match=r"tensor_parallel_size does not allow .*down_proj.*at 40 and 320"),
    ):
        checkpoint.weight(refused)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (DYNAMIC | {"fmt": "e5m2"}, r"format e5m2 \(fmt\).*supported: e4m3"),
        (DYNAMIC | {"weight_block_size": [128]}, r"weight_block_size \[128\].*multiple of 32"),
        (DYNAMIC | {"weight_block_size": [128, 48]}, r"weight_block_size \[128, 48\].*multiple of 32"),
        (DYNAMIC | {"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        (DYNAMIC | {"weight_block_size": "128"}, r"weight_block_size '128'"),
        (DYNAMIC | {"kv_cache_scheme": {"num_bits": 8}}, "a quantized KV cache"),
        (_compressed(strategy="block"), "the block_structure None.*multiple of 32"),
        (_compressed(strategy="group", group_size=128), "float8 by group.*tensor, channel, block"),
        (_compressed(strategy="tensor", num_bits=4), "float of 4 bits"),
        (
            _by_layer(
                attention=BLOCKS, mlp=Kind(_compressed(strategy="block", block_structure=[64, 64]), _by_row)
            ).config,
            r"blocks of \[128, 128\] and \[64, 64\] \(block_structure\).*one size",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe_quantization(values)
