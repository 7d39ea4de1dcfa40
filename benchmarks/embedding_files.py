"""Writes the models of the comparison of embeddings.

    python benchmarks/embedding_files.py checkpoint SHAPE DIRECTORY
    .peers/sentence/bin/python benchmarks/embedding_files.py onnx DIRECTORY FILE

A checkpoint has random weights in bf16, and modules of sentence-transformers: pooling and normalization. From
it, the ONNX file is exported by torch, and its weights quantized to int8 by channels by ONNX Runtime.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from embedding_shapes import LONGEST, SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULES = ("models.Transformer", "models.Pooling", "models.Normalize")


def random_model(shape: str) -> PreTrainedModel:
    """Return a model in bf16, random but always the same."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    entries = {name: value for name, value in SHAPES[shape].items() if name != "model_type"}
    config = AutoConfig.for_model(SHAPES[shape]["model_type"], **entries)
    model: PreTrainedModel = AutoModel.from_config(config, dtype=torch.bfloat16)
    return model


def write_checkpoint(shape: str, directory: Path) -> None:
    """Write a checkpoint as sentence-transformers publishes them."""
    from peers_model import write_tokenizer

    directory.mkdir(parents=True)
    random_model(shape).save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "config.json").write_text(
        json.dumps(SHAPES[shape] | {"dtype": "bfloat16"}), encoding="utf-8"
    )
    folders = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.{name}"}
        for number, (folder, name) in enumerate(zip(folders, MODULES, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    pooling = {
        "word_embedding_dimension": SHAPES[shape]["hidden_size"],
        "pooling_mode_mean_tokens": "qwen3" not in shape,
        "pooling_mode_lasttoken": "qwen3" in shape,
    }
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    longest = {"max_seq_length": LONGEST, "do_lower_case": False}
    (directory / "sentence_bert_config.json").write_text(json.dumps(longest), encoding="utf-8")


class _States(torch.nn.Module):
    """A model that takes ids and their mask, and returns the last states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found = (
            self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            if (self._model.config.model_type == "qwen3")
            else self._model(input_ids=input_ids, attention_mask=attention_mask)
        )
        states: torch.Tensor = found.last_hidden_state
        return states


def write_onnx(checkpoint: Path, path: Path) -> None:
    """Write the file with weights in int8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids, mask = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        exported = Path(directory, "model.onnx")
        torch.onnx.export(
            _States(model).eval(),
            (ids, mask),  # one tensor for both would become one input
            exported,
            input_names=["input_ids", "attention_mask"],
            dynamic_shapes=(shape, shape),
            dynamo=True,
        )
        quantize_dynamic(exported, path, weight_type=QuantType.QInt8, per_channel=True)


def main() -> None:
    """Write what the command line names."""
    kind, source, target = sys.argv[1:]
    if kind == "onnx":
        write_onnx(Path(source), Path(target))
    else:
        write_checkpoint(source, Path(target))


if __name__ == "__main__":
    main()
