"""Models of the shapes that people run, without files: every matrix of one shape is the same one."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers_model import write_tokenizer
from peers_shapes import SHAPES

from quire.models.checkpoints import loading
from quire.models.embedding import FloatEmbedding
from quire.models.weights import WeightSource

STANDARD_DEVIATION = 0.02  # of weights
_QWEN3 = SHAPES["0.6b"].config
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3,
    "Llama-3-8B": {
        **_QWEN3,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8_192,
        "rope_theta": 500_000,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def config(name: str, *, is_tiny: bool, **changes: Any) -> dict[str, Any]:
    """Return config.json of a model; a tiny one keeps the kind of its layers and its vocabulary is small."""
    chosen = CONFIGS[name]
    if not is_tiny:
        return {**chosen, **changes}
    sizes = {**_TINY, "intermediate_size": 128, "head_dim": 32, "vocab_size": 2_000}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {**chosen, **sizes, **(experts if "num_experts" in chosen else {}), **changes}


class RandomWeights:
    """Stands for a `Checkpoint` that has every weight."""

    def __init__(self, _path: Path) -> None:
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()

    def check_names(self, *_: object) -> None:
        """Find nothing missing."""

    def tensor(self, source: WeightSource) -> torch.Tensor:
        """Return bfloat16 numbers; those of norms are 1."""
        shape = source.held_shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        if shape not in self._made:
            generator = torch.Generator().manual_seed(len(self._made))
            numbers = torch.randn(shape, generator=generator, dtype=torch.float32)
            self._made[shape] = (numbers * STANDARD_DEVIATION).bfloat16()
        return self._made[shape]

    weight = tensor

    def matrix(self, sources: Sequence[WeightSource]) -> list[torch.Tensor]:
        """Return one part for each source."""
        return [self.tensor(source) for source in sources]

    def embedding(self, source: WeightSource, dtype: torch.dtype) -> FloatEmbedding:
        """Return the vectors of tokens."""
        return FloatEmbedding(self.tensor(source).to(dtype))

    def release(self, _source: Iterable[WeightSource]) -> None:
        """Keep it: others of its shape are the same."""


@contextlib.contextmanager
def model_without_files(name: str, *, is_tiny: bool, **changes: Any) -> Iterator[str]:
    """Yield a directory without weights; engines of this process find them all the same meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        content = json.dumps(config(name, is_tiny=is_tiny, **changes), indent=1)
        Path(directory, "config.json").write_text(content, encoding="utf-8")
        Path(directory, "model.safetensors").touch()  # by which engines know whether it is replaced
        with mock.patch.object(loading, "Checkpoint", RandomWeights):
            yield directory
