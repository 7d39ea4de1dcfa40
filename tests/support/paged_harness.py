"""Drives a `Decoder` over a paged cache as a scheduler would, with shuffled blocks and a poisoned cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from caches import cache_of, states_of
from quire.kernels.attention.batch import AttentionBatch, StepStates
from quire.models.decoder import Decoder


@dataclasses.dataclass
class Generated:
    """One prompt's greedy continuation and the logits [tokens, vocab] that each token came from."""

    token_ids: list[int]
    logits: torch.Tensor


class PagedHarness:
    """A cache for a few sequences. Unused table entries are no block ids at all."""

    def __init__(self, decoder: Decoder, lengths: list[int], *, block_size: int = 16, seed: int = 0) -> None:
        config = decoder.config
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        self.decoder = decoder
        self.block_size = block_size
        self.kv_cache = cache_of(config, num_blocks, block_size, decoder.dtype)
        self.kv_cache.tensor.view(torch.uint8).fill_(0xFF)  # not a number, in any type of floats
        self.states = states_of(config, len(lengths), decoder.dtype)
        free = iter(np.random.default_rng(seed).permutation(num_blocks))
        self.block_tables = np.full((len(lengths), max(needed) + 1), 2**31 - 1, dtype=np.int32)
        for row, count in enumerate(needed):
            self.block_tables[row, :count] = [next(free) for _ in range(count)]

    def step(self, sequences: list[int], computed: list[int], token_ids: list[list[int]]) -> torch.Tensor:
        """Compute the given tokens of each sequence; return the hidden states [T, hidden]."""
        batch = AttentionBatch.build(
            np.array(computed),
            np.array([len(ids) for ids in token_ids]),
            self.block_tables[sequences],
            self.block_size,
            states=self.states and StepStates(np.array(sequences, dtype=np.int64), self.states.layers),
        )
        flat = torch.tensor([token for ids in token_ids for token in ids])
        return self.decoder.forward(flat, self.kv_cache.views, batch)


def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    *,
    num_new: int,
    chunk: int = 10_000,
    first_chunk: int | None = None,
    block_size: int = 16,
    seed: int = 0,
) -> list[Generated]:
    """Continue all prompts at once, greedily; prompts enter in chunks while others already decode.

    Args:
        chunk: tokens of each prompt in one step.
        first_chunk: tokens of each prompt in the first step; None: as in all others.
    """
    harness = PagedHarness(
        decoder, [len(prompt) + num_new for prompt in prompts], block_size=block_size, seed=seed
    )
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while running := [s for s in range(len(prompts)) if len(logits[s]) < num_new]:
        size = chunk if first_chunk is None or any(computed) else first_chunk
        parts = [tokens[s][computed[s] : computed[s] + size] for s in running]
        hidden = harness.step(running, [computed[s] for s in running], parts)
        last_rows = hidden[torch.tensor([len(part) for part in parts]).cumsum(0) - 1]
        rows = decoder.logits(last_rows).clone()
        for row, s, part in zip(rows, running, parts, strict=True):
            computed[s] += len(part)
            if computed[s] == len(tokens[s]):
                logits[s].append(row)
                tokens[s].append(int(row.argmax()))
    return [Generated(tokens[s][len(prompts[s]) :], torch.stack(logits[s])) for s in range(len(prompts))]


def random_prompts(lengths: list[int], *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, none of them special."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length).tolist() for length in lengths]
