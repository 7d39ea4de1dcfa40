"""Writes the model of the comparison: random weights in the shape of a published model, and a tokenizer.

    python benchmarks/peers_model.py [--shape 0.6b|4b|...] DIRECTORY

It is an ordinary Hugging Face checkpoint in bf16, which Quire reads in all precisions and from which the
files of other engines are converted. `transformers` initializes the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peers_limit import ModelWork
from peers_shapes import END_OF_TEXT_ID, SHAPES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0
END_OF_TEXT = "<|endoftext|>"


def random_model(config: dict[str, Any], device: str = "cpu") -> PreTrainedModel:
    """Return a model in bf16, random but always the same; on the device `meta` it has no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # which takes seconds

    torch.manual_seed(SEED)
    entries = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device(device):
        read = AutoConfig.for_model(config["model_type"], **entries)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(read, dtype=torch.bfloat16)
    return model


def work_of(config: dict[str, Any]) -> ModelWork:
    """Return what a model computes with, from its matrices in `transformers`."""
    model = random_model(config, "meta")
    layers = experts = keys = queries = 0
    types = getattr(model.config, "layer_types", None)
    for name, matrix in model.named_parameters():
        if matrix.ndim < 2 or "embed_tokens" in name or name.startswith("lm_head."):
            continue
        if ".experts." in name:
            experts += matrix.numel()
            continue
        layers += matrix.numel()
        if "self_attn" in name and (types is None or types[int(name.split(".")[2])] == "full_attention"):
            keys += matrix.shape[0] if name.endswith(".k_proj.weight") else 0
            queries += matrix.shape[1] if name.endswith(".o_proj.weight") else 0
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    return ModelWork(
        layer_weights=layers,
        head_weights=config["vocab_size"] * config["hidden_size"],
        kv_values=2 * keys,
        query_values=queries,
        expert_weights=experts // num_experts,
        num_experts=num_experts,
        experts_per_token=config.get("num_experts_per_tok", 0),
    )


def write_tokenizer(directory: Path, vocab_size: int = 0) -> None:
    """Write a byte-level tokenizer with one merge. It is only needed for loading: prompts are token ids.

    Args:
        directory: where to.
        vocab_size: tokens that it has at least; llama.cpp's script cuts some embeddings to what it has.
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", END_OF_TEXT]
    tokens += [f"<unused{number}>" for number in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def write_checkpoint(config: dict[str, Any], directory: Path) -> None:
    """Write a random model that `config`, its config.json, describes, and the tokenizer."""
    random_model(config).save_pretrained(directory)
    write_tokenizer(directory, config["vocab_size"])
    # In place of what transformers wrote: older versions, which other engines use, know what was published.
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="default: 0.6b")
    parser.add_argument("directory", type=Path, help="output directory; created if missing")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(SHAPES[options.shape].config, options.directory)


if __name__ == "__main__":
    main()
