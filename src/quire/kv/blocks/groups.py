"""Groups of layers that keep the keys and values of the same tokens.

The layers of a group share block tables and a pool of blocks: a block holds the same tokens in all of them,
whatever the sizes of their heads are. The first group keeps all tokens of a sequence. Each window that layers
have makes another group, whose tables name `NULL_BLOCK` for tokens before the window of a sequence: those
blocks are back in the pool. Tables of all groups are equally long, so that a token's place follows from its
position alone. Any group may have no layers; its blocks are numbers only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.step import IntArray

if TYPE_CHECKING:
    from quire.kv.blocks.events import KVEventSink
    from quire.kv.cache.page_layout import KVLayerSpec

NULL_BLOCK = 0
"""In tables of a group with a window: tokens that no layer will read. Its memory is zero for ever."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same window.

    Args:
        window: tokens that the layers see, the current one included; 0: all.
        layers: [layers of the model] what each layer of the group keeps; None: it is of another group, or
            has no KV.
    """

    window: int
    layers: tuple[KVLayerSpec | None, ...]


def cache_groups(layers: Sequence[KVLayerSpec | None], *, keeps_all: bool) -> tuple[CacheGroup, ...]:
    """Return the groups of a model's layers: the one that keeps all tokens first, then by falling window.

    Args:
        layers: what each layer keeps; None: nothing.
        keeps_all: layers with windows keep all tokens, too, in the one group that there is.
    """
    windows = [0] * len(layers) if keeps_all else [0 if spec is None else spec.window for spec in layers]
    return tuple(
        CacheGroup(
            window, tuple(spec if own == window else None for spec, own in zip(layers, windows, strict=True))
        )
        for window in (0, *sorted(set(windows) - {0}, reverse=True))
    )


def first_in_window(num_tokens: IntArray | int, window: int, block_size: int) -> IntArray:
    """Return the number of the first block that the token after `num_tokens` others sees."""
    first: IntArray = np.maximum(num_tokens - window + 1, 0) // block_size
    return first


def first_moved(num_tokens: IntArray | int, window: int, block_size: int) -> IntArray:
    """Return the number of the first block of a group with a window that is moved with a prefix.

    The blocks from there on are seen by the tokens behind the prefix, and by those behind its full blocks, so
    that the prefix cache can find these.

    Args:
        num_tokens: of the prefix.
        window: of the group.
        block_size: tokens per block.
    """
    return first_in_window(num_tokens // block_size * block_size, window, block_size)


@dataclasses.dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of a group with a window, as a scheduler needs to know them.

    Args:
        window: tokens that the layers see, the current one included, at least 1.
        num_blocks: maximum number of blocks, `NULL_BLOCK` included.
        commit: given a number of further blocks of reserved memory, returns how many may be used now; None:
            all may be used from the start.
        events: gets the blocks that become findable and those that stop being so.
    """

    window: int
    num_blocks: int
    commit: Callable[[int], int] | None = None
    events: KVEventSink | None = None
