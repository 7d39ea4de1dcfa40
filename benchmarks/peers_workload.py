"""The comparison's precisions, KV cache size and workloads.

Plain Python only: every worker imports this module in its own environment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from peers_shapes import SMALLEST_VOCABULARY

PRECISIONS = ("bf16", "int8", "int4")

NUM_THREADS = 2
MAX_NUM_SEQS = 64
# Tokens in the KV cache: four requests of 4,160 tokens, or 64 that share 1,024 tokens and have 64 each, and
# some to spare. A whole number of blocks of 16, 32 and 128 tokens. 2.5 GB in bf16.
KV_TOKENS = 21_760
MAX_MODEL_LEN = 4_224

WARM_UP_PROMPT_TOKENS = 512
WARM_UP_OUTPUT_TOKENS = 4
FIRST_ORDINARY_TOKEN = 1_000  # smaller ids are the tokenizer's special and byte tokens


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
        ids = range(FIRST_ORDINARY_TOKEN, SMALLEST_VOCABULARY - FIRST_ORDINARY_TOKEN)
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
