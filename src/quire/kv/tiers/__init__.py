"""KV tiers in memory, on disk or in a store, for prompts that come again after the cache has evicted them.

`TierConnector` is the KV connector; a `BlockTier` is where its blocks are: `MemoryTier`, `DiskTier` or
`MooncakeTier`.

The built-in connector, `TierConnector` (`kv/tiers/`), keeps prompts' blocks in a `BlockTier`: host memory, or
a file, which a `CachedTier` may be in front of, whose blocks are in places of one mapping (`BlockMemory`).
`ResidentBlocks` is a tier's index, and decides what is stored and what is evicted; both sides of the
connector share it. All its loads are asynchronous. Threads read (`BlockReader`) and write (`BlockWriter`),
one block at a time; a load that is cancelled is locked out of its blocks. Pieces of the states of recurrent
layers are stored and loaded as blocks are (`kv/blocks/state_pieces.py`). What they see of the cache is a
`BlockCopier`, which begins copies in an order with the steps: `HostCopier` copies at once, `DeviceCopier`
(`kv/tiers/device_copier.py`) has queues of a device do it, and says why the order holds; on a GPU,
`engine/building/assembly.py` gives it to every `TierConnector`. Other connectors have single blocks from
`block_store` (`kv/connectors/host_blocks.py`), and wait for each. All that is CUDA's is in a `CopyDevice`
(`kernels/devices/cuda_copies.py`), which `tests/support/late_device.py` stands in for. `LoadCosts` compares
what loading and computing take. A `MooncakeTier` has to `search` for blocks of other engines, for which a
request waits a moment; the client of its store runs in a process (`mooncake/process.py`). `save_kv` and
`restore_kv` move one prompt's blocks between a tier and a file, in the writer's thread. docs/kv-tiers.md has
the file format.
"""
