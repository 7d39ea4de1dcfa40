"""Copies one prompt's KV between a tier and a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quire.errors import KVFileError
from quire.kv.blocks.block_hash import BlockKey
from quire.kv.connectors.host_blocks import ByteArray
from quire.kv.tiers.disk.kv_file import KVFile, prompt_keys, write_kv_file
from quire.kv.tiers.tier import BlockTier

Identity = Callable[[], Mapping[str, str]]
"""Returns what KV of this engine is computed by, in named parts; may take seconds."""


def save_prompt(
    tier: BlockTier,
    path: Path,
    token_ids: list[int],
    *,
    cache_salt: str,
    block_size: int,
    num_pieces: int,
    identity: Identity,
) -> tuple[int, bool]:
    """Save the full blocks of a prompt if the tier has them all; else have it store them at their next use.

    With states, which have `num_pieces` then, it is the full blocks before the last token, and the state
    behind them.

    Returns:
        The number of tokens whose KV the tier has, and whether the file was written.

    Raises:
        KVFileError: the file cannot be written, or there is nothing to write.
    """
    num_blocks = (len(token_ids) - bool(num_pieces)) // block_size
    if not num_blocks:
        raise KVFileError(f"{len(token_ids)} tokens fill no block of {block_size} with a state behind it")
    token_ids = token_ids[: num_blocks * block_size]
    keys = prompt_keys(token_ids, block_size, cache_salt, num_pieces=num_pieces)
    tier.residents.expect(keys)
    num_stored = tier.residents.count_leading(keys)
    is_saved = num_stored == len(keys) and write_kv_file(
        path,
        identity(),
        token_ids,
        block_size=block_size,
        bytes_per_block=tier.bytes_per_block,
        num_pieces=num_pieces,
        read_block=lambda index, into: tier.read(keys[index], into),
    )
    return min(num_stored, num_blocks) * block_size, is_saved


def restore_prompt(
    tier: BlockTier, path: Path, *, cache_salt: str, block_size: int, num_pieces: int, identity: Identity
) -> list[int]:
    """Store the blocks of a saved prompt in a tier, and its state; return the prompt's tokens.

    Raises:
        KVFileError: the file cannot be read, is damaged or has another identity; or the tier cannot be
            written to, or is too small.
    """
    if not tier.is_writable:
        raise KVFileError("the KV tier is written by another engine; restore KV there, or use another path")
    generation = tier.residents.generation
    with contextlib.closing(KVFile(path)) as file:
        file.require(identity())
        saved = prompt_keys(file.token_ids, block_size, num_pieces=num_pieces)
        keys = prompt_keys(file.token_ids, block_size, cache_salt, num_pieces=num_pieces)
        tier.residents.expect(keys)
        content: ByteArray = np.empty(tier.bytes_per_block, dtype=np.uint8)
        for index, key in enumerate(keys):
            file.read(index, saved[index], content)
            tier.write(key, content, generation)
        _require_stored(tier, keys, len(file.token_ids), block_size)
        return file.token_ids


def _require_stored(tier: BlockTier, keys: list[BlockKey], num_tokens: int, block_size: int) -> None:
    num_stored = tier.residents.count_leading(keys)
    if num_stored < len(keys):
        without_state = "" if num_stored * block_size < num_tokens else ", without their state,"
        raise KVFileError(
            f"only {min(num_stored * block_size, num_tokens)} of {num_tokens} tokens{without_state} fit into "
            "the KV tier; raise kv_tier_size, or free the disk"
        )
