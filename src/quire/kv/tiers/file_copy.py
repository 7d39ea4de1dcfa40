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
    identity: Identity,
) -> tuple[int, bool]:
    """Save the full blocks of a prompt if the tier has them all; else have it store them at their next use.

    Returns:
        The number of tokens whose KV the tier has, and whether the file was written.

    Raises:
        KVFileError: the file cannot be written.
    """
    keys = prompt_keys(token_ids, block_size, cache_salt)
    blocks = [keys[index] for index in range(len(keys))]
    tier.residents.expect(blocks)
    num_stored = tier.residents.count_leading(blocks)
    is_saved = num_stored == len(blocks) and write_kv_file(
        path,
        identity(),
        token_ids[: num_stored * block_size],
        block_size=block_size,
        bytes_per_block=tier.bytes_per_block,
        read_block=lambda index, into: tier.read(blocks[index], into),
    )
    return num_stored * block_size, is_saved


def restore_prompt(
    tier: BlockTier, path: Path, *, cache_salt: str, block_size: int, identity: Identity
) -> list[int]:
    """Store the blocks of a saved prompt in a tier; return the prompt's tokens.

    Raises:
        KVFileError: the file cannot be read, is damaged or has another identity; or the tier cannot be
            written to, or is too small.
    """
    if not tier.is_writable:
        raise KVFileError("the KV tier is written by another engine; restore KV there, or use another path")
    generation = tier.residents.generation
    with contextlib.closing(KVFile(path)) as file:
        file.require(identity())
        saved = prompt_keys(file.token_ids, block_size)
        keys = prompt_keys(file.token_ids, block_size, cache_salt)
        blocks = [keys[index] for index in range(len(keys))]
        tier.residents.expect(blocks)
        content: ByteArray = np.empty(tier.bytes_per_block, dtype=np.uint8)
        for index, key in enumerate(blocks):
            file.read(index, saved[index], content)
            tier.write(key, content, generation)
        _require_stored(tier, blocks, block_size)
        return file.token_ids


def _require_stored(tier: BlockTier, blocks: list[BlockKey], block_size: int) -> None:
    num_stored = tier.residents.count_leading(blocks)
    if num_stored < len(blocks):
        raise KVFileError(
            f"only {num_stored * block_size} of {len(blocks) * block_size} tokens fit into the KV tier; "
            "raise kv_tier_size, or free the disk"
        )
