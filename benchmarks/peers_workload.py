"""The comparison's model shapes, KV cache size and workloads.

Plain Python only: every worker imports this module in its own environment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PRECISIONS = ("bf16", "int8", "int4")

NUM_THREADS = 2
MAX_NUM_SEQS = 64
# Tokens in the KV cache: four requests of 4,160 tokens, or 64 that share 1,024 tokens and have 64 each, and
# some to spare. A whole number of blocks of 16, 32 and 128 tokens. 2.5 GB in bf16.
KV_TOKENS = 21_760
MAX_MODEL_LEN = 4_224

WARM_UP_PROMPT_TOKENS = 512
WARM_UP_OUTPUT_TOKENS = 4
VOCAB_SIZE = 151_936
FIRST_ORDINARY_TOKEN = 1_000  # smaller ids are the tokenizer's special and byte tokens


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention, a gated MLP and tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = VOCAB_SIZE

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads) * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Elements of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_values(self) -> int:
        """Elements of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


SHAPES = {  # Qwen3's
    "0.6b": ModelShape(hidden_size=1_024, intermediate_size=3_072, num_layers=28, num_heads=16),
    "4b": ModelShape(hidden_size=2_560, intermediate_size=9_728, num_layers=36, num_heads=32),
}


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together; sizes in tokens.

    `shared_tokens` is the length of a cached prefix that all share; each request has `prompt_tokens` more.
    """

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    counts_prompts: bool = False
    max_rounds: int = 3

    @property
    def counted_tokens(self) -> int:
        """Tokens for the rate: output tokens, and prompt tokens in workloads that measure prefill."""
        prompts = self.prompt_tokens if self.counts_prompts else 0
        return self.num_requests * (prompts + self.output_tokens)

    @property
    def warm_up(self) -> Workload:
        """The same requests with shorter outputs."""
        return Workload(
            self.name,
            self.num_requests,
            min(self.prompt_tokens, WARM_UP_PROMPT_TOKENS),
            min(self.output_tokens, WARM_UP_OUTPUT_TOKENS),
            self.shared_tokens,
        )

    def prompts(self, seed: str) -> list[list[int]]:
        """Return random token ids for each request, fixed by the seed; only the prefix is shared."""
        generator = random.Random(f"{self.name} {seed}")
        ids = range(FIRST_ORDINARY_TOKEN, VOCAB_SIZE - FIRST_ORDINARY_TOKEN)
        prefix = generator.choices(ids, k=self.shared_tokens)
        return [prefix + generator.choices(ids, k=self.prompt_tokens) for _ in range(self.num_requests)]


WORKLOADS = {
    entry.name: entry
    for entry in (
        Workload("1x32/32", 1, 32, 32),
        Workload("16x32/32", 16, 32, 32),
        Workload("8x256/1", 8, 256, 1, counts_prompts=True),
        Workload("1x1024/1", 1, 1_024, 1, counts_prompts=True),
        Workload("16x128/64", 16, 128, 64),
        Workload("4x4096/64", 4, 4_096, 64, max_rounds=1),
        Workload("64x1024+32/32", 64, 32, 32, shared_tokens=1_024),
    )
}
