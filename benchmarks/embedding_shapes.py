"""The shapes, workloads and engines of the comparison of embeddings.

Plain Python only: every worker imports this module in its own environment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NUM_THREADS = 2
BATCH_TEXTS = 32  # what sentence-transformers computes at once by default
LONGEST = 512
SMALLEST_VOCABULARY = 30_522
FIRST_ORDINARY_TOKEN = 1_000


def _bert(**sizes: int) -> dict[str, Any]:
    common = {"architectures": ["BertModel"], "vocab_size": 30_522, "max_position_embeddings": LONGEST}
    return {"model_type": "bert", **common, **sizes}


SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": _bert(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1_536),
    "bge-base": _bert(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3_072),
    "modernbert-base": {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "vocab_size": 50_368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1_152,
        "max_position_embeddings": 8_192,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 257,
        "bos_token_id": 257,
        "eos_token_id": 257,
        "cls_token_id": 257,
        "sep_token_id": 257,
    },
    "qwen3-embedding-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "vocab_size": 151_669,
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 257,
        "bos_token_id": 257,
        "eos_token_id": 257,
    },
}


@dataclass(frozen=True)
class Workload:
    """Texts that are given together; `shortest` to `longest` tokens each."""

    num_texts: int
    shortest: int
    longest: int

    @property
    def name(self) -> str:
        """How tables name it."""
        length = self.longest if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return f"{self.num_texts}x{length}"

    def texts(self, seed: str) -> list[list[int]]:
        """Return random token ids for each text, fixed by the seed."""
        generator = random.Random(f"{self.name} {seed}")
        ids = range(FIRST_ORDINARY_TOKEN, SMALLEST_VOCABULARY)
        lengths = [generator.randint(self.shortest, self.longest) for _ in range(self.num_texts)]
        return [generator.choices(ids, k=length) for length in lengths]


WORKLOADS = [
    *(Workload(texts, length, length) for texts in (1, 32, 512) for length in (16, 128, 512)),
    Workload(512, 16, LONGEST),
]
