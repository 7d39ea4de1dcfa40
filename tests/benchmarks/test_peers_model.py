"""The model's quantized files, against its bf16 one."""

from __future__ import annotations

import torch
from peers_quantized import gptq, is_quantized, w8a8

from quire.kernels.layers.weights import dequantize
from quire.models.checkpoints.quantized.formats import gptq_format


def test_int8_weights_times_their_scales_are_the_weights_to_half_a_scale():
    weights = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = w8a8("layer.up_proj.weight", weights)
    assert set(result) == {"layer.up_proj.weight", "layer.up_proj.weight_scale"}
    values, scales = result["layer.up_proj.weight"], result["layer.up_proj.weight_scale"].float()
    assert values.dtype == torch.int8
    assert scales.shape == (24, 1)
    assert torch.equal(values.abs().amax(dim=1), torch.full((24,), 127, dtype=torch.int8))
    assert torch.all((values * scales - weights.float()).abs() <= 0.5001 * scales)


def test_gptq_weights_are_the_weights_to_half_a_step():
    weights = (torch.randn(24, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    result = gptq("layer.up_proj.weight", weights)
    parts = {name.removeprefix("layer.up_proj."): tensor for name, tensor in result.items()}
    read = gptq_format("gptq").decode(parts, (24, 256))
    steps = weights.float().view(24, 2, 128).abs().amax(dim=2) / 7
    error = (dequantize(read) - weights.float()).view(24, 2, 128).abs()
    assert torch.all(error <= 0.51 * steps[..., None])


def test_matrices_of_layers_are_quantized_but_for_what_is_small():
    layer = "model.layers.3"
    for name in ("self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.out_proj", "mlp.down_proj"):
        assert is_quantized(f"{layer}.{name}.weight")
    for name in ("self_attn.q_norm", "linear_attn.in_proj_a", "linear_attn.conv1d", "mlp.gate"):
        assert not is_quantized(f"{layer}.{name}.weight")
    assert not is_quantized("model.embed_tokens.weight")
    assert not is_quantized("lm_head.weight")
