"""Shapes of models that people run; tiny ones in Triton's interpreter."""

from __future__ import annotations

import dataclasses

from quire.kernels.triton.device import is_interpreted


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer of a model."""

    hidden: int
    intermediate: int  # of an expert, in a mixture
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0


SHAPES = {
    "Qwen3-0.6B": Shape(1024, 3072, 16, 8, 128),
    "Llama-3-8B": Shape(4096, 14336, 32, 8, 128),
    "Qwen3-30B-A3B": Shape(2048, 768, 32, 4, 128, experts=128, experts_per_token=8),
}
NUM_ROWS = (1, 7, 64, 300, 2048)
LENGTHS = (1, 17, 256, 257, 1000, 3000)  # tokens of sequences
VOCAB_SIZE = 151_936
if is_interpreted:
    SHAPES = {
        "dense": Shape(128, 256, 4, 2, 32),
        "mixture": Shape(128, 64, 2, 1, 16, experts=4, experts_per_token=2),
    }
    NUM_ROWS = (1, 3, 5)
    LENGTHS = (1, 17, 70)
    VOCAB_SIZE = 1000
