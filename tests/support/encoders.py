"""Small random encoders, written by `transformers`, with a WordPiece tokenizer beside them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 384
LENGTHS = [1, 2, 511, 37, 512]
WORDS = ("hello", "world", "##ing", ".", ",")

_BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_FEW_IDS = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "cls", "sep", "eos"))}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {  # class in transformers without its ending, its config
    "bert": ("Bert", _BERT),
    "bert-other": ("Bert", _BERT | {"hidden_act": "gelu_new", "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", _BERT | {"max_position_embeddings": 514}),
    "xlm-roberta": ("XLMRoberta", _BERT | {"max_position_embeddings": 515, "pad_token_id": 2}),
    "camembert": ("Camembert", _BERT | {"max_position_embeddings": 514, "type_vocab_size": 1}),
    "mpnet": ("MPNet", _BERT | {"max_position_embeddings": 514}),
    "modernbert": ("ModernBert", _BERT | _FEW_IDS | {"local_attention": 17, "num_hidden_layers": 5}),
    "modernbert-biases": (
        "ModernBert",
        _BERT | _FEW_IDS | {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "nomic": ("NomicBert", _BERT),
    "embeddinggemma": (
        "Gemma3Text",
        _BERT
        | _FEW_IDS
        | {
            "num_hidden_layers": 7,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 18,
            "use_bidirectional_attention": True,
        },
    ),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCAB_SIZE,
            "dim": 64,
            "hidden_dim": 112,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", _BERT | _FEW_IDS | {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": ("Qwen2", _BERT | _FEW_IDS | {"num_key_value_heads": 2}),
    "llama": ("Llama", _BERT | _FEW_IDS),
    "mistral": ("Mistral", _BERT | _FEW_IDS | {"num_key_value_heads": 2, "sliding_window": 20}),
}


def make_encoder(name: str, *, kind: str = "Model", **config: Any) -> Any:
    """Return a random model of transformers of this name; `kind` is the ending of its class."""
    import transformers

    stem, shape = (ENCODERS | DECODERS)[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{stem}Config")(**{**shape, **config})
    model = getattr(transformers, f"{stem}{kind}")(made).eval()
    with torch.no_grad():
        for parameter_name, values in model.named_parameters():
            is_vector = values.dim() == 1
            values.copy_(torch.randn_like(values) * (0.2 if is_vector else values.shape[-1] ** -0.5))
            if is_vector and parameter_name.endswith("weight"):
                values.add_(1)
    return model


def save_encoder(model: Any, path: Path, modules: dict[str, dict[str, Any]] | None = None) -> Path:
    """Write a model with a tokenizer, and modules of sentence-transformers: configs by their kinds."""
    model.save_pretrained(path)
    word_pieces().save(str(path / "tokenizer.json"))
    if modules is not None:
        listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        for number, (kind, config) in enumerate(modules.items(), 1):
            folder = path / f"{number}_{kind}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            listed.append(
                {"idx": number, "path": folder.name, "type": f"sentence_transformers.models.{kind}"}
            )
        (path / "modules.json").write_text(json.dumps(listed))
    return path


def word_pieces() -> Tokenizer:
    """Return a tokenizer as BERT's: words and letters, between [CLS] and [SEP]."""
    letters = string.ascii_lowercase
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def random_prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    """Return prompts of these lengths, without special tokens."""
    generator = np.random.default_rng(0)
    return [generator.integers(5, VOCAB_SIZE, length).tolist() for length in lengths]


def hidden_states(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the last hidden states of a prompt by itself, [T, hidden]."""
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return states
