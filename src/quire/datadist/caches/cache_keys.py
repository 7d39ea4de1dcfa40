"""Keys of slots and blocks caches of a PROMPT."""

from __future__ import annotations

import dataclasses
from types import EllipsisType

from quire.datadist.argument_checks import I64, U32, U64, UINT64_MAX, ArgumentChecks, one_of


@dataclasses.dataclass(frozen=True, init=False)
class CacheKey:
    """Names one slot of a contiguous cache, by request or by prefix.

    With `prefix_id`, it is a prefix key, and `req_id` is ignored. With neither, it is a placeholder.

    Args:
        prompt_cluster_id: tells a DECODER which link to use; also taken as `cluster_id`.
        req_id: id of the request; `UINT64_MAX`: none.
        model_id: id of the model.
        prefix_id: id of the prefix; `UINT64_MAX`: none.
    """

    prompt_cluster_id: int
    req_id: int
    model_id: int
    prefix_id: int

    def __init__(
        self,
        prompt_cluster_id: int | EllipsisType = ...,
        req_id: int | EllipsisType = ...,
        model_id: int = 0,
        prefix_id: int = UINT64_MAX,
        *,
        cluster_id: int | EllipsisType = ...,
    ) -> None:
        named = one_of("CacheKey", prompt_cluster_id=prompt_cluster_id, cluster_id=cluster_id)
        if req_id is ...:
            raise TypeError("CacheKey() is missing the argument req_id")
        with ArgumentChecks() as check:
            _set(self, "prompt_cluster_id", check.integer("prompt_cluster_id", named, U64))
            _set(self, "req_id", check.integer("req_id", req_id, U64))
            _set(self, "model_id", check.integer("model_id", model_id, U64))
            _set(self, "prefix_id", check.integer("prefix_id", prefix_id, U64))

    @property
    def cluster_id(self) -> int:
        """Another name of `prompt_cluster_id`."""
        return self.prompt_cluster_id

    @property
    def is_prefix_key(self) -> bool:
        """Whether it names a prefix."""
        return self.prefix_id != UINT64_MAX

    @property
    def is_placeholder(self) -> bool:
        """Whether it names nothing."""
        return self.req_id == UINT64_MAX and not self.is_prefix_key


@dataclasses.dataclass(frozen=True, init=False)
class CacheKeyByIdAndIndex:
    """Names one slot of a contiguous cache by the cache's id on the PROMPT.

    Args:
        cluster_id: tells a DECODER which link to use.
        cache_id: `KvCache.cache_id`.
        batch_index: index of the slot.
    """

    cluster_id: int
    cache_id: int
    batch_index: int

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        with ArgumentChecks() as check:
            _set(self, "cluster_id", check.integer("cluster_id", cluster_id, U64))
            _set(self, "cache_id", check.integer("cache_id", cache_id, I64))
            _set(self, "batch_index", check.integer("batch_index", batch_index, U32))


@dataclasses.dataclass(frozen=True, init=False)
class BlocksCacheKey:
    """Names the blocks cache of a model.

    Args:
        prompt_cluster_id: tells a DECODER which link to use; also taken as `cluster_id`.
        model_id: id of the model.
    """

    prompt_cluster_id: int
    model_id: int

    def __init__(
        self,
        prompt_cluster_id: int | EllipsisType = ...,
        model_id: int = 0,
        *,
        cluster_id: int | EllipsisType = ...,
    ) -> None:
        named = one_of("BlocksCacheKey", prompt_cluster_id=prompt_cluster_id, cluster_id=cluster_id)
        with ArgumentChecks() as check:
            _set(self, "prompt_cluster_id", check.integer("prompt_cluster_id", named, U64))
            _set(self, "model_id", check.integer("model_id", model_id, U64))

    @property
    def cluster_id(self) -> int:
        """Another name of `prompt_cluster_id`."""
        return self.prompt_cluster_id


def _set(key: object, name: str, value: int) -> None:
    object.__setattr__(key, name, value)
