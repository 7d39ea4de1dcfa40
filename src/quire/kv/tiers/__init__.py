"""KV kept in host memory or on disk, for prompts that come again after the cache has forgotten them.

`TierConnector` is the KV connector; a `BlockTier` is where its blocks are: `MemoryTier` or `DiskTier`.
"""
