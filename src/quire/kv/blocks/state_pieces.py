"""States of recurrent layers on their way to and from other places: in pieces as large as a KV block.

What keeps or sends blocks of one size keeps or sends a state as so many more of them. The first piece follows
the block that the state is behind, as if it was the next block of the sequence, and each other one follows
the piece before; so where only the ends of prefixes are removed, a state goes before its block does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from quire.kv.blocks.block_hash import DIGEST_BYTES, BlockKey
from quire.step import SchedulerOutput


class StatePiece(NamedTuple):
    """A piece of a checkpoint, in place of a block.

    `number` is its number among the pieces of all checkpoints, and `block_id` that of a block which is
    useless without it, of the first cache group.
    """

    block_id: int
    number: int


def pieces_of(checkpoint: int, num_pieces: int, block_id: int) -> list[StatePiece]:
    """Return the pieces of a checkpoint, of which each has `num_pieces`; for `block_id` see `StatePiece`."""
    first = checkpoint * num_pieces
    return [StatePiece(block_id, number) for number in range(first, first + num_pieces)]


def piece_keys(key: BlockKey, num_pieces: int) -> list[BlockKey]:
    """Return the keys of the pieces of the state behind a block; no block has the same one."""
    digests = [key.digest, *piece_digests(key.digest, num_pieces)]
    return [BlockKey(digest, parent, key.tokens) for parent, digest in itertools.pairwise(digests)]


def piece_digests(digest: bytes, num_pieces: int) -> list[bytes]:
    """Return the digests of these keys, given that of the block."""
    digests = []
    for _ in range(num_pieces):
        digest = blake2b(digest, digest_size=DIGEST_BYTES, person=b"state").digest()
        digests.append(digest)
    return digests


class HeldState(NamedTuple):
    """A checkpoint that holds the state behind a request's first `num_tokens` tokens."""

    request_id: str
    num_tokens: int
    checkpoint: int


def states_held(plan: SchedulerOutput) -> Iterator[HeldState]:
    """Yield the checkpoints that a step restores or saves, each with what it holds behind the step."""
    if plan.state_copies is None:
        return
    copies = plan.state_copies
    rows = {slot: row for row, slot in enumerate(plan.slots.tolist())}
    overwritten = set(copies.saved[:, 1].tolist())
    for checkpoint, slot in copies.restored.tolist():
        if slot in rows and checkpoint not in overwritten:
            row = rows[slot]
            yield HeldState(plan.request_ids[row], int(plan.num_computed_tokens[row]), checkpoint)
    num_tokens = plan.num_computed_tokens + np.asarray(copies.num_tokens)
    for slot, checkpoint in copies.saved.tolist():
        yield HeldState(plan.request_ids[rows[slot]], int(num_tokens[rows[slot]]), checkpoint)
