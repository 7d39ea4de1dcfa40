"""What tests of a pair do and expect: keys bound on the PROMPT, and what a DECODER gets for them."""

from __future__ import annotations

import numpy as np
from failing import fails_with
from pairs import Pair
from sides import POOL, byte_desc, num_free_bytes, pattern, read_cache, write_new_blocks, write_new_cache

from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, KvCache, LLMStatusCode

UINT64_MAX = 2**64 - 1
PLACEHOLDER = CacheKey(1, UINT64_MAX)


def prefix_key(prefix_id: int, model_id: int = 0) -> CacheKey:
    return CacheKey(1, UINT64_MAX, model_id, prefix_id)


def bound(pair: Pair, desc: CacheDesc, keys, *, seed: int) -> KvCache:
    """Allocate a cache on the PROMPT, bind keys to its slots and fill it with `pattern`."""
    return pair.call(write_new_cache, pair.pm, desc, keys, seed=seed)


def bound_only(pair: Pair, desc: CacheDesc, keys, *, seed: int) -> None:
    """Like `bound`, but only the keys hold the cache."""
    pair.pm.deallocate_cache(bound(pair, desc, keys, seed=seed))


def bound_blocks(pair: Pair, desc: CacheDesc, key: BlocksCacheKey, *, seed: int) -> KvCache:
    """Allocate a blocks cache on the PROMPT and fill it with `pattern`."""
    return pair.call(write_new_blocks, pair.pm, desc, key, seed=seed)


def free_on_prompt(pair: Pair, pool: int = POOL) -> int:
    return pair.call(num_free_bytes, pair.pm, pool)


def assert_slot(pair: Pair, cache: KvCache, slot: int, expected: np.ndarray) -> None:
    """Expect bytes, [num_tensors, bytes], in a slot of a cache of the DECODER."""
    np.testing.assert_array_equal(read_cache(pair.dm, cache)[:, slot], expected)


def assert_pullable(pair: Pair, key, desc: CacheDesc, slot: int, *, seed: int) -> None:
    """Pull a key and expect the bytes of a slot of `pattern`."""
    target = pair.dm.allocate_cache(CacheDesc(desc.num_tensors, [1, *desc.shape[1:]], desc.data_type))
    pair.dm.pull_cache(key, target)
    assert_slot(pair, target, 0, pattern(desc, seed)[:, slot])
    pair.dm.deallocate_cache(target)


def assert_gone(pair: Pair, key) -> None:
    target = pair.dm.allocate_cache(byte_desc(1, 1))
    with fails_with(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        pair.dm.pull_cache(key, target)
    pair.dm.deallocate_cache(target)
