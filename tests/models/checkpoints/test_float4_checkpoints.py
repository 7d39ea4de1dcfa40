"""MXFP4, NVFP4 and bitsandbytes: the numbers that each format's definition gives, worked out one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_model, save_checkpoint
from paged_harness import generate, random_prompts
from quire.errors import ModelError
from quire.kernels.layers.weights import GroupedWeight, Int8Weight, dequantize
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.weights import weight_specs

Tensors = dict[str, torch.Tensor]
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


def _e2m1(code: int) -> float:
    """Return what the four bits of sign, exponent and mantissa stand for."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


E2M1 = np.array([_e2m1(code) for code in range(16)], np.float32)


def _pack(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Put pairs of 4 bits into bytes, the first into the lower half."""
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def _mxfp4(rng: np.random.Generator, *shape: int) -> tuple[Tensors, torch.Tensor]:
    """Return blocks and scales of random numbers [..., in], and the numbers."""
    *outer, inputs = shape
    codes = rng.integers(0, 16, (*outer, inputs // 32, 32))
    exponents = rng.integers(119, 125, (*outer, inputs // 32))
    floats = E2M1[codes] * (2.0 ** (exponents - 127.0))[..., None].astype(np.float32)
    parts = {"blocks": _pack(codes), "scales": torch.from_numpy(exponents.astype(np.uint8))}
    return parts, torch.from_numpy(floats.reshape(shape).astype(np.float32))


def _write(path: Path, tensors: Tensors, quantization: dict[str, Any]) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))


def _gpt_oss(path: Path) -> Any:
    """Write a gpt-oss model with experts in MXFP4; return it in floats."""
    model = make_model("gpt_oss", intermediate_size=96, num_hidden_layers=2)
    rng = np.random.default_rng(0)
    quantized: Tensors = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = parameter.shape
            parts, floats = _mxfp4(rng, experts, outputs, inputs)
            parameter.data = floats.transpose(1, 2).contiguous()
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            quantized |= {f"{prefix}_{last}": part for last, part in parts.items()}
    save_checkpoint(model, path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("up_proj", "down_proj"))}
    _write(path, kept | quantized, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def _all_equal(path: Path, floats: Tensors, read_as: type) -> int:
    """Return the number of quantized matrices; all matrices equal those in `floats`."""
    count = 0
    with Checkpoint(path) as checkpoint:
        for spec in weight_specs(read_model_config(path)):
            for source in spec.sources:
                weight = checkpoint.weight(source)
                if not isinstance(weight, torch.Tensor):
                    assert isinstance(weight, read_as)
                    count += 1
                    weight = dequantize(weight)
                torch.testing.assert_close(weight.float(), floats[source.name].float(), atol=0, rtol=0)
    return count


@pytest.mark.parametrize("kernels", ["auto", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_experts_of_gpt_oss_in_mxfp4(kernels: str, tmp_path: Path) -> None:
    model = _gpt_oss(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.stored_quantization, config.stored_group_size) == ("mxfp4", 32)
    floats = dict(model.state_dict())
    for index in range(2):
        own = f"model.layers.{index}.mlp.experts."
        for expert in range(5):
            gate_up = floats[f"{own}gate_up_proj"][expert].t()
            floats[f"{own}{expert}.gate_proj.weight"] = gate_up[::2]
            floats[f"{own}{expert}.up_proj.weight"] = gate_up[1::2]
            floats[f"{own}{expert}.down_proj.weight"] = floats[f"{own}down_proj"][expert].t()
            for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
                bias = floats[f"{own}gate_up_proj_bias"][expert, rows]
                floats[f"{own}{expert}.{part}_proj.bias"] = bias
            floats[f"{own}{expert}.down_proj.bias"] = floats[f"{own}down_proj_bias"][expert]
    assert _all_equal(tmp_path, floats, GroupedWeight) == 2 * 5 * 3
    options = WeightOptions(int4_activations="bfloat16", kernels=kernels)
    decoder = load_decoder(tmp_path, config, options=options)
    (prompt,) = random_prompts([30], vocab_size=384)
    (generated,) = generate(decoder, [prompt], num_new=4)
    with torch.no_grad():
        expected = model(torch.tensor([prompt + generated.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    assert (generated.logits - expected).square().mean() < 4e-4 * expected.square().mean()


def _compressed(kind: str, group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }


def _encode_mxfp4(rng: np.random.Generator, rows: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    parts, floats = _mxfp4(rng, rows, inputs)
    return {"weight_packed": parts["blocks"].flatten(1), "weight_scale": parts["scales"]}, floats


def _encode_nvfp4(rng: np.random.Generator, rows: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    codes = rng.integers(0, 16, (rows, inputs // 16, 16))
    scales = torch.from_numpy(rng.uniform(8, 400, (rows, inputs // 16))).to(torch.float8_e4m3fn)
    whole = np.float32(5000.0)
    floats = E2M1[codes] * (scales.float().numpy() / whole)[..., None]
    parts = {
        "weight_packed": _pack(codes.reshape(rows, inputs)),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([whole]),
        "input_global_scale": torch.ones(1),
    }
    return parts, torch.from_numpy(floats.reshape(rows, inputs))


def _encode_nf4(
    rng: np.random.Generator, rows: int, inputs: int, *, nested: bool
) -> tuple[Tensors, torch.Tensor]:
    codes = rng.integers(0, 16, rows * inputs)
    blocks = -(-rows * inputs // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [rows, inputs]}
    largest = rng.uniform(0.1, 0.4, blocks).astype(np.float32)
    parts = {"weight.absmax": torch.from_numpy(largest)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        steps = rng.integers(0, 256, blocks)
        outer = rng.uniform(0.5, 1.0, -(-blocks // 256)).astype(np.float32)
        mapped = np.linspace(-0.2, 0.2, 256).astype(np.float32)
        largest = np.array(
            [mapped[step] * outer[i // 256] + np.float32(0.25) for i, step in enumerate(steps)], np.float32
        )
        parts = {
            "weight.absmax": torch.from_numpy(steps.astype(np.uint8)),
            "weight.nested_absmax": torch.from_numpy(outer),
            "weight.nested_quant_map": torch.from_numpy(mapped),
        }
    floats = np.array([np.float32(NF4[code]) * largest[i // 64] for i, code in enumerate(codes)], np.float32)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts |= {
        "weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": text,
    }
    return parts, torch.from_numpy(floats.reshape(rows, inputs))


def _encode_int8(rng: np.random.Generator, rows: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    values = torch.from_numpy(rng.integers(-127, 128, (rows, inputs)).astype(np.int8))
    largest = torch.from_numpy(rng.uniform(0.1, 0.5, rows).astype(np.float32))
    parts = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, values.float() * (largest / 127)[:, None]


Encode = Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]
KINDS: dict[str, tuple[dict[str, Any], Encode, type, tuple[str, int]]] = {
    "mxfp4": (_compressed("mxfp4-pack-quantized", 32), _encode_mxfp4, GroupedWeight, ("mxfp4", 32)),
    "nvfp4": (_compressed("nvfp4-pack-quantized", 16), _encode_nvfp4, GroupedWeight, ("grouped_int8", 16)),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda rng, rows, inputs: _encode_nf4(rng, rows, inputs, nested=False),
        torch.Tensor,
        ("none", 128),
    ),
    "nf4, nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda rng, rows, inputs: _encode_nf4(rng, rows, inputs, nested=True),
        torch.Tensor,
        ("none", 128),
    ),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        _encode_int8,
        Int8Weight,
        ("int8", 128),
    ),
}


def _quantized(path: Path, name: str) -> Tensors:
    """Write a model in which the matrices of layers are of a kind; return its tensors in floats."""
    config, encode, _, _ = KINDS[name]
    make_checkpoint("llama", path, num_hidden_layers=1, intermediate_size=160)
    rng = np.random.default_rng(1)
    floats, stored = load_file(path / "model.safetensors"), {}
    for tensor_name, tensor in floats.items():
        if tensor_name.endswith("_proj.weight"):
            parts, floats[tensor_name] = encode(rng, *tensor.shape)
            stored |= {tensor_name.removesuffix("weight") + last: part for last, part in parts.items()}
        else:
            stored[tensor_name] = tensor
    _write(path, stored, config)
    return floats


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_gives_the_numbers_of_its_definition(name: str, tmp_path: Path) -> None:
    floats = _quantized(tmp_path, name)
    config = read_model_config(tmp_path)
    assert (config.stored_quantization, config.stored_group_size) == KINDS[name][3]
    is_held = KINDS[name][2] is not torch.Tensor
    assert _all_equal(tmp_path, floats, KINDS[name][2]) == 7 * is_held
    decoder = load_decoder(tmp_path, config)
    assert len(generate(decoder, random_prompts([5], vocab_size=384), num_new=3)[0].token_ids) == 3


@pytest.mark.parametrize(
    ("name", "part", "changed", "message"),
    [
        ("mxfp4", "weight_scale", lambda part: torch.full_like(part, 255), "invalid scales: NaN"),
        ("mxfp4", "weight_packed", lambda part: part.view(torch.int8), "stored as torch.int8; uint8"),
        ("mxfp4", "weight_scale", lambda part: part[:, :1], r"has shape \[64, 1\]; \[64, 2\] is needed"),
        ("nvfp4", "weight_global_scale", lambda part: part * 0, "must be one positive number"),
        ("nvfp4", "weight_global_scale", lambda part: None, "needed are exponents in uint8"),
        ("nf4", "weight", lambda part: part[1:], "bytes; 2048 are needed"),
        ("nf4", "weight.quant_map", lambda part: part[1:], r"has shape \[15\]; \[16\] is needed"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda part: part[1:], "cannot be read"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda part: part[:0], "cannot be read"),
        ("nf4", "weight.absmax", lambda part: part[1:], "63 scales for 4096 numbers in blocks of 64"),
        ("nf4", "weight.absmax", lambda part: None, "lacks .*q_proj.weight_absmax"),
        ("nf4, nested", "weight.nested_absmax", lambda part: part / 0, "infinite or NaN"),
        ("int8", "SCB", lambda part: part[1:], r"has shape \[63\]"),
        ("int8", "weight_format", lambda part: part + 1, "weight_format is not 0"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, part: str, changed: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    _quantized(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stem = "model.layers.0.self_attn.q_proj."
    wrong = changed(tensors.pop(stem + part))
    save_file(tensors if wrong is None else tensors | {stem + part: wrong.contiguous()}, file)
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path, read_model_config(tmp_path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda tensor: tensor[:4], "has 4 experts; there must be 5, as config.json says"),
        (lambda tensor: tensor[:, :63], r"has shape \[112, 63\]; config.json asks for \[112, 64\]"),
        (lambda tensor: tensor[:, 0], r"0.gate_proj.weight in .* has shape \[112\]"),
        (lambda tensor: tensor[:, 0, 0], r"gate_up_proj in .* cannot be read|has shape"),
        (lambda tensor: tensor[:, :0], r"has shape \[112, 0\]"),
        (lambda tensor: tensor[..., None], r"gate_up_proj in .* cannot be read|has shape"),
    ],
)
def test_experts_in_one_tensor_that_do_not_fit_are_named(
    changed: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    make_checkpoint("gpt_oss", tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors | {name: changed(tensors[name]).contiguous()}, file)
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path, read_model_config(tmp_path))
