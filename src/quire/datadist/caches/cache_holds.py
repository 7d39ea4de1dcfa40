"""A cache in a pool, and its holders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_keys import CacheKey
from quire.datadist.status import invalid

M = TypeVar("M")

SlotName = tuple[bool, int, int]
"""Identity of a key on this PROMPT: (is it a prefix, prefix or request id, model id)."""


@dataclasses.dataclass(eq=False)
class PooledCache(Generic[M]):
    """A cache and its holders; only modified by the pool."""

    cache_id: int
    desc: CacheDesc
    memory: M
    is_blocks: bool
    is_of_model: bool = False
    is_registered: bool = False
    has_handle: bool = True
    num_keys: int = 0
    num_transfers: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that count for the pool: 0 for registered memory."""
        return 0 if self.is_registered else self.desc.num_tensors * self.desc.tensor_bytes


@dataclasses.dataclass(eq=False)
class Binding(Generic[M]):
    """One binding of a key; binding it again makes another."""

    name: SlotName
    cache: PooledCache[M]
    slot: int


EndTransfer = Callable[[PooledCache[M], Binding[M] | None], None]
"""Releases a cache, and a consumed key."""


class SourceHold(Generic[M]):
    """Keeps a cache for one transfer. `end` must be called, and may be called again.

    Attributes:
        cache: what is read.
        slot: that was named, or None if it is a blocks cache.
    """

    def __init__(
        self,
        end_transfer: EndTransfer[M],
        cache: PooledCache[M],
        slot: int | None,
        binding: Binding[M] | None,
    ) -> None:
        self.cache = cache
        self.slot = slot
        self._end_transfer = end_transfer
        self._binding = binding
        self._has_ended = False

    def end(self, *, consume: bool) -> None:
        """End the transfer; with `consume`, unbind the request key unless it has been bound again."""
        if not self._has_ended:
            self._has_ended = True
            self._end_transfer(self.cache, self._binding if consume else None)


def slot_name(key: CacheKey) -> SlotName:
    """Return the identity of a key."""
    return key.is_prefix_key, key.prefix_id if key.is_prefix_key else key.req_id, key.model_id


def slot_names(desc: CacheDesc, keys: Sequence[CacheKey]) -> dict[SlotName, int]:
    """Return the slot of each key (the last, if repeated), ignoring placeholders."""
    if len(keys) > desc.batch_size:
        raise invalid(f"there are {len(keys)} keys for {desc.batch_size} slots")
    return {slot_name(key): slot for slot, key in enumerate(keys) if not key.is_placeholder}
