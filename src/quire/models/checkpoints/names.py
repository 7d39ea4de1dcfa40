"""Tensor names in safetensors files, by Quire's families. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import ModelError
from quire.models.config_entries import MAX_LAYERS_TIMES_EXPERTS

if TYPE_CHECKING:
    import torch

_PARTS_OF_BODY = {
    "model.": ("embed_tokens.", "embed_tokens_per_layer.", "per_layer_", "layers.", "norm."),
    "transformer.": ("word_embeddings.", "wte.", "wpe.", "h.", "ln_f."),
}
_DECODER = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
_ENCODER = re.compile(
    r"(bert|roberta|distilbert|mpnet)\.(?=embeddings\.|encoder\.|transformer\.|pooler\.)"
    r"|model\.(?=embeddings\.|final_norm\.)"
)
_OTHER_PART = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|connector|image_newline|"
    r"audio_tower|embed_vision|embed_audio)\b"
)
_STACKED = re.compile(
    r"(model\.layers\.([0-9]{1,6})\.(?:mlp\.|block_sparse_moe\.|feed_forward\.)?experts\.)(gate_up_proj|down_proj)"
    r"(|_bias|_blocks|_scales)"
)
_CONV1D = re.compile(r"transformer\.h\.[0-9]{1,6}\.(attn|mlp)\.c_(attn|proj|fc)\.weight")
_QUANT_STATE = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(nf4|fp4))$"
)
# Published with all experts of a layer in one tensor, and saved by transformers in another way.
_EITHER_WAY = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
_RENAMED = {  # of OLMo-Hybrid and Kimi, as transformers renames them, and of Granite's experts
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".LayerNorm.gamma": ".LayerNorm.weight",  # as in the first files of BERT
    ".LayerNorm.beta": ".LayerNorm.bias",
    # Of MPNet, and of all layers; T5 has it in the first one.
    "encoder.relative_attention_bias.": "encoder.layer.0.attention.relative_attention_bias.",
    **{f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
}
_LAST_PARTS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


class StoredLayout(NamedTuple):
    """How files hold matrices that are not by themselves, as [outputs, inputs].

    Args:
        num_experts: in each of the tensors that hold all experts of a layer.
        takes_turns: whether their outputs are of gate and up by turns, and not first all of gate.
        hidden_size: inputs of gate and up, and outputs of down: matrices in floating point that do not have
            them there are [inputs, outputs]; 0: they always are.
        is_conv1d: whether the layers' matrices are [inputs, outputs], as of GPT-2.
    """

    num_experts: int = 0
    takes_turns: bool = False
    hidden_size: int = 0
    is_conv1d: bool = False


def stored_layout(architecture: str, entries: Mapping[str, Any]) -> StoredLayout | None:
    """Return how a model's files hold matrices; None: in tensors of their own, [outputs, inputs].

    Args:
        architecture: in config.json.
        entries: of the decoder, unchecked.
    """
    if architecture == "GPT2LMHeadModel":
        return StoredLayout(is_conv1d=True)
    experts, hidden_size = (
        entries.get("num_local_experts") or entries.get("num_experts"),
        entries.get("hidden_size"),
    )
    if not isinstance(experts, int) or not isinstance(hidden_size, int) or experts < 1:
        return None
    if architecture == "GptOssForCausalLM":
        return StoredLayout(experts, takes_turns=True)
    if architecture in _EITHER_WAY or architecture.startswith("GraniteMoe"):
        return StoredLayout(experts, takes_turns=False, hidden_size=hidden_size)
    return None


class StoredPart(NamedTuple):
    """A tensor in a file, or what is one expert's in it."""

    name: str
    expert: int | None = None  # None: the whole
    outputs: slice = slice(None)
    is_transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole tensor."""
        if self.expert is None:
            return tensor.t() if self.is_transposed else tensor
        own = tensor[self.expert]
        return (own.t() if self.is_transposed else own)[self.outputs]


def published_parts(
    stored: str, shape: Sequence[int], layout: StoredLayout | None
) -> Iterator[tuple[str, StoredPart]]:
    """Yield the weights in a tensor by their names in a whole model, with one for each expert.

    Args:
        stored: the tensor's name.
        shape: its shape.
        layout: of the model's files.

    Raises:
        ModelError: it has more experts than the model.
    """
    name = published_name(stored)
    if layout is not None and layout.is_conv1d:
        yield name, StoredPart(stored, is_transposed=_CONV1D.fullmatch(name) is not None)
        return
    found = _STACKED.fullmatch(name)
    if layout is None or found is None or not shape:
        yield name, StoredPart(stored)
        return
    if shape[0] != layout.num_experts or int(found[2]) >= MAX_LAYERS_TIMES_EXPERTS // layout.num_experts:
        raise ModelError(
            f"{stored:.200} has {shape[0]} experts; there must be {layout.num_experts}, as config.json says, "
            f"and at most {MAX_LAYERS_TIMES_EXPERTS} in all layers"
        )
    experts, _, projection, kind = found.groups()
    place_of_hidden = 1 if projection == "down_proj" else 2  # in [experts, outputs, inputs]
    is_transposed = not kind and layout.hidden_size not in shape[place_of_hidden : place_of_hidden + 1]
    outputs = {"down_proj": slice(None)}
    if projection == "gate_up_proj":
        half = shape[-1 if is_transposed else 1] // 2 if len(shape) > 1 else 0
        of_both = (slice(0, None, 2), slice(1, None, 2))
        outputs = dict(
            zip(
                ("gate_proj", "up_proj"),
                of_both if layout.takes_turns else (slice(half), slice(half, None)),
                strict=True,
            )
        )
    for expert in range(shape[0]):
        for part, rows in outputs.items():
            last = _LAST_PARTS[kind]
            yield f"{experts}{expert}.{part}.{last}", StoredPart(stored, expert, rows, is_transposed)


def published_name(stored: str) -> str:
    """Return a tensor's name in a whole model, such as `model.norm.weight` for `norm.weight`.

    Files may hold a model's body as it is saved by itself, and the decoder of a multimodal model has one of
    several prefixes; `transformers` adds and removes them, too. Parts of a quantized matrix differ in the
    last component alone.
    """
    stored = _DECODER.sub("", stored, count=1) if _DECODER.match(stored) else stored
    if found := _QUANT_STATE.search(stored):
        stored = f"{stored[: found.start()]}.weight_{found[1].replace('.', '_')}"
    if found := _ENCODER.match(stored):
        return published_name(stored[found.end() :])
    for old, new in _RENAMED.items():
        stored = stored.replace(old, new)
    for body, parts in _PARTS_OF_BODY.items():
        if stored.startswith(parts):
            return body + stored
    return stored.removeprefix("model.") if stored.startswith("model.lm_head.") else stored


def is_of_other_part(stored: str) -> bool:
    """Return whether a tensor of a multimodal model belongs to its vision or audio."""
    return _OTHER_PART.match(stored) is not None
