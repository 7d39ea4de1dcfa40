"""Decoders of multimodal models: equal to `transformers` for text, however files name weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_tokenizer, randomize
from paged_harness import generate, random_prompts
from quire.errors import ModelError, UnknownArchitectureError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import load_decoder
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.reading import model_config
from quire.models.weights import count_parameters
from quire.models.wrappers import decoder_entries

NUM_NEW = 24
TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
YARN = {
    "type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0,
}
ARCHITECTURES_OF = {"mistral-small": "Mistral3ForConditionalGeneration"}
ARCHITECTURES_OF |= {"gemma4-experts": "Gemma4ForConditionalGeneration"}

# architecture: (config class, entries of the decoder, of vision or audio, and others)
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20, "num_hidden_layers": 6},
        {**VISION, "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 384,
        },
        {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        {"audio_config": None},
    ),
    "gemma4-experts": (
        "Gemma4Config",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "use_bidirectional_attention": "vision",
        },
        {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        {"audio_config": None},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
        {"audio_config": {"audio_embed_dim": 16}},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4Config",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "intermediate_size_mlp": 112,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "moe_layers": [1, 3],
            "attention_chunk_size": 11,
        },
        {**VISION, "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_output_dim": 32},
        {},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"model_type": "ministral3", "head_dim": 24, "rope_parameters": YARN},
        {**VISION, "image_size": 28, "patch_size": 14, "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "mistral-small": (
        "Mistral3Config",
        {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        {**VISION, "image_size": 28, "patch_size": 14, "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        {"tie_word_embeddings": True},
    ),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", {"rope_parameters": MROPE}, QWEN_VISION, {}),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5Config",
        {
            "head_dim": 32,
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        QWEN_VISION,
        {"tie_word_embeddings": True},
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeConfig",
        {
            "head_dim": 32,
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
        QWEN_VISION,
        {"tie_word_embeddings": False},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {
            "head_dim": 16,
            "rope_parameters": MROPE,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": False},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        {},
    ),
    "LlavaNextForConditionalGeneration": (
        "LlavaNextConfig",
        {"model_type": "mistral", "sliding_window": None},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        {},
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "LlavaOnevisionConfig",
        {"model_type": "qwen2"},
        {**VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        {},
    ),
    "Idefics3ForConditionalGeneration": (
        "Idefics3Config",
        {"model_type": "llama"},
        {**VISION, "image_size": 28, "patch_size": 14},
        {},
    ),
    "SmolVLMForConditionalGeneration": (
        "SmolVLMConfig",
        {"model_type": "llama"},
        {**VISION, "image_size": 28, "patch_size": 14},
        {},
    ),
    "InternVLForConditionalGeneration": (
        "InternVLConfig",
        {"model_type": "qwen2"},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        {"tie_word_embeddings": False},
    ),
    "VoxtralForConditionalGeneration": (
        "VoxtralConfig",
        {"model_type": "llama", "head_dim": 16},
        {**VISION, "hidden_size": 16, "num_mel_bins": 8, "max_source_positions": 8},
        {},
    ),
}


def _model(name: str) -> Any:
    import transformers

    class_name, text, other, beside = SHAPES[name]
    kind = getattr(transformers, class_name)
    part = "audio_config" if "Voxtral" in name else "vision_config"
    config = kind(text_config={**TEXT, **text}, **{part: other}, **beside)
    config._attn_implementation = "eager"
    model = getattr(transformers, ARCHITECTURES_OF.get(name, name))._from_config(config)
    randomize(model, seed=0)
    return model.float().eval()


def _decoder_of(model: Any) -> Any:
    if not hasattr(model, "model"):
        return model.language_model.model
    return model.model.text_model if hasattr(model.model, "text_model") else model.model.language_model


def _expected_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        whole = model if hasattr(model, "model") else model.language_model  # Llama 4's whole cannot compute
        return whole(input_ids=torch.tensor([tokens])).logits[0].float()


def _save(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)
    make_tokenizer(directory)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", list(SHAPES))
def test_greedy_tokens_and_logits_of_text_equal_transformers(name: str, tmp_path: Path) -> None:
    model = _model(name)
    _save(model, tmp_path)
    decoder = load_decoder(tmp_path, read_model_config(tmp_path))
    body = sum(tensor.numel() for tensor in _decoder_of(model).state_dict().values())
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    output = 0 if is_tied else model.get_output_embeddings().weight.numel()
    assert count_parameters(decoder.config) == body + output
    prompts = random_prompts([1, 5, 43], vocab_size=384)
    whole = generate(decoder, prompts, num_new=NUM_NEW)
    chunked = generate(decoder, prompts, num_new=NUM_NEW, chunk=7, seed=1)
    for prompt, one, other in zip(prompts, whole, chunked, strict=True):
        expected = _expected_logits(model, prompt + one.token_ids[:-1])[len(prompt) - 1 :]
        assert one.token_ids == expected.argmax(-1).tolist()
        assert other.token_ids == one.token_ids
        torch.testing.assert_close(one.logits, expected, atol=1e-4, rtol=0)


def _renamed(directory: Path, prefixes: dict[str, str]) -> None:
    file = directory / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        old = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        renamed[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, file, {"format": "pt"})


NAMINGS = {
    "of the decoder as a model": {
        "model.language_model.": "language_model.model.",
        "language_model.": "language_model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "of all parts in a model": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "of the decoder alone": {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
}


@pytest.mark.parametrize("naming", list(NAMINGS))
def test_every_naming_of_weights_is_read(naming: str, tmp_path: Path) -> None:
    model = _model("mistral-small")
    _save(model, tmp_path)
    config = read_model_config(tmp_path)
    prompt = random_prompts([9], vocab_size=384)
    expected = generate(load_decoder(tmp_path, config), prompt, num_new=4)[0]
    _renamed(tmp_path, NAMINGS["of the decoder as a model"])
    _renamed(tmp_path, NAMINGS[naming])
    again = generate(load_decoder(tmp_path, read_model_config(tmp_path)), prompt, num_new=4)[0]
    assert torch.equal(again.logits, expected.logits)


def test_experts_in_one_tensor_lie_either_way(tmp_path: Path) -> None:
    _save(_model("Qwen3VLMoeForConditionalGeneration"), tmp_path)
    prompt = random_prompts([9], vocab_size=384)
    expected = generate(load_decoder(tmp_path, read_model_config(tmp_path)), prompt, num_new=4)[0]
    file = tmp_path / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file, {"format": "pt"})
    again = generate(load_decoder(tmp_path, read_model_config(tmp_path)), prompt, num_new=4)[0]
    assert torch.equal(again.logits, expected.logits)


def test_experts_in_one_tensor_are_read_as_those_by_themselves(tmp_path: Path) -> None:
    """Qwen3.5's files are published so; transformers saves them by themselves."""
    _save(_model("Qwen3_5MoeForConditionalGeneration"), tmp_path)
    prompt = random_prompts([9], vocab_size=384)
    expected = generate(load_decoder(tmp_path, read_model_config(tmp_path)), prompt, num_new=4)[0]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        experts = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{e}.{part}_proj.weight") for e in range(5)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{experts}gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}down_proj": down}
    save_file(tensors, file, {"format": "pt"})
    again = generate(load_decoder(tmp_path, read_model_config(tmp_path)), prompt, num_new=4)[0]
    assert torch.equal(again.logits, expected.logits)


def test_another_tensor_is_no_part_to_pass_over(tmp_path: Path) -> None:
    model = _model("mistral-small")
    _save(model, tmp_path)
    _renamed(tmp_path, {"language_model.model.norm.": "language_model.model.layers.0.normal."})
    _renamed(tmp_path, {"model.language_model.norm.": "model.language_model.layers.0.normal."})
    with pytest.raises(ModelError, match=r"lacks model\.norm\.weight"):
        load_decoder(tmp_path, read_model_config(tmp_path))


def test_vision_belongs_to_wrappers_only(tmp_path: Path) -> None:
    model = _model("LlavaForConditionalGeneration")
    _save(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(decoder_entries(values)))
    with pytest.raises(ModelError, match=r"multi_modal_projector.* LlamaForCausalLM .*does not have"):
        load_decoder(tmp_path, read_model_config(tmp_path))


# text_configs as they are published, with what their classes leave to their defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "Mistral3ForConditionalGeneration": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "LlavaForConditionalGeneration": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
}


@pytest.mark.parametrize("architecture", list(PUBLISHED))
def test_what_a_text_config_leaves_out_is_as_in_transformers(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    published = copy.deepcopy(PUBLISHED[architecture])
    config_class = getattr(transformers, SHAPES[architecture][0])
    complete = config_class(text_config=copy.deepcopy(published)).to_dict()
    values = {"architectures": [architecture], "torch_dtype": "float16", "text_config": published}
    assert model_config(values) == model_config(
        {**complete, "architectures": [architecture], "dtype": "float16"}
    )
    assert not caplog.records


def test_an_old_config_has_the_decoder_beside_vision(caplog: pytest.LogCaptureFixture) -> None:
    flat = {
        **TEXT,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 5,
        "model_type": "qwen2_5_vl",
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 8},
        "vision_start_token_id": 6,
    }
    config = model_config(flat)
    text = {name: flat[name] for name in (*TEXT, "rms_norm_eps", "rope_theta")}
    assert config == model_config(
        {
            "architectures": flat["architectures"],
            "dtype": "bfloat16",
            "text_config": {**text, "model_type": "qwen2_5_vl_text", "tie_word_embeddings": True},
        }
    )
    assert (config.ropes[0].kind, config.tie_word_embeddings) == ("default", True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text_config": ["x"]}, ModelError, "text_config .* must be an object"),
        ({"text_config": {"model_type": "mpt"}}, UnknownArchitectureError, "type 'mpt', which .*Llava"),
        ({"text_config": {"model_type": ["x"]}}, UnknownArchitectureError, r"type \['x'\]"),
        ({"text_config": {"hidden_size": "8"}}, ModelError, "hidden_size '8'"),
        ({"architectures": ["Florence2ForConditionalGeneration"]}, UnknownArchitectureError, "Florence2"),
        ({"architectures": [["x"]]}, ModelError, "architectures"),
    ],
)
def test_other_wrappers_are_refused_by_name(
    changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        model_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": TEXT, **changes})


def test_tokens_beyond_the_decoder_are_left_out_and_its_ends_are_read(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    text = {**TEXT, "vocab_size": 260, "model_type": "llama", "eos_token_id": [2, 7]}
    values = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    beyond = {**saved["added_tokens"][0], "id": 300, "content": "<image>"}
    file.write_text(json.dumps({**saved, "added_tokens": [*saved["added_tokens"], beyond]}))
    tokenizer = read_tokenizer(tmp_path)
    assert 7 in tokenizer.eos_token_ids
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": 9}))
    assert read_tokenizer(tmp_path).eos_token_ids == (9, 2)


def test_float8_in_a_wrapper_with_scales_of_activations(tmp_path: Path) -> None:
    """As Ministral 3 is published: a scale for each matrix of the decoder, none for vision."""
    _save(_model("Mistral3ForConditionalGeneration"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if "language_model" in name and name.endswith("_proj.weight"):
            scale = (tensor.abs().max() / 448).bfloat16()
            stored[name] = (tensor / scale.float()).to(torch.float8_e4m3fn)
            tensors[name] = stored[name].float() * scale.float()
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.weight_scale_inv": scale, f"{stem}.activation_scale": torch.tensor(0.5)}
    save_file(tensors, file)
    (prompt,) = random_prompts([9], vocab_size=384)
    expected = generate(load_decoder(tmp_path, read_model_config(tmp_path)), [prompt], num_new=4)[0]
    save_file(stored, file)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_model_config(tmp_path)
    assert config.stored_quantization == "fp8"
    found = generate(load_decoder(tmp_path, config), [prompt], num_new=4)[0]
    assert torch.equal(found.logits, expected.logits)
