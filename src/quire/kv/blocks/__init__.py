"""The logical KV cache: blocks, hashes, and who holds them. No tensors.

`BlockPool` alone changes reference counts. It is a set of arrays by block number: counts, digests, parents,
tokens, hits. A block is *in use*, *idle* (free, content still findable) or *blank*; blank ones are given out
first. The retention policy chooses which idle block is rewritten next (docs/policies.md). `KVCacheManager`
keeps the block tables by slot, as one array for all cache groups, each of which has a pool (`BlockPools`).

**Windows.** Before each step, blocks before the window of all tokens still to be computed go back to the pool
of their group, but first they wait until lookups can find them. Tokens of drafts in flight may be computed
once more, so a row that waits for them keeps its blocks. Steps are computed in order, so a block may be given
away although a step in flight still reads it. What is left behind is rewritten before all other idle blocks,
unless a lookup has found it, or needs it to find the same prompt again.

**Prefixes.** The key of a full block is a digest chained over its parent's digest and its tokens; the chain
starts with a digest of the request's cache salt, and is computed as far as blocks are looked for, found or
computed. While others run, a step looks for 1,024 blocks of a prompt at most, and a longer one that is cached
is admitted some steps later. On a hit, tokens and parent are compared, so a collision is a miss and never a
wrong answer. The last token is always computed, because its logits are needed. A request that asks for
`prompt_logprobs` takes nothing from the cache, because it needs the logits of every position. A request's
blocks are released tail first, so that the start of a prefix lives longest.

**Within a step.** Blocks become findable when the step that fills them has been applied, but for a request
that is admitted in the same step: `StepSharing` lets it reuse full blocks that the step is about to fill, so
that a burst computes its common prefix once. A forward pass writes a layer's KV of all tokens before its
attention reads any. If the step is lost or fails, all of its requests go back; if the request that fills the
blocks fails, those that reuse them do; if it is aborted or preempted, its tokens are computed all the same.

**Growth.** With `num_kv_blocks` and `cache_size` both 0, the memory plan decides how large the cache may
become, and only address space is reserved. `BlockPool.commit_ahead` asks for more blocks, at least 1/64 of
the total at a time, before a step may need them; `CacheGrowth` grants them while the machine has memory to
spare. After a refusal it does not ask again for a second. Until more is granted, the cache stays as it is:
prefixes are rewritten, requests wait or are preempted. A cache of a given size has all its blocks from the
start. No cache gives memory back.

The first write to memory costs more than all later ones, so while the engine has nothing to do, a thread has
the system provide the memory of the blank blocks that the next step may use
(`engine/memory/cache_warming.py`).

**Leases.** Blocks that no running request holds may be held by a lease, until a deadline
(`kv/blocks/leases.py`). A *pin* keeps the full blocks of a prompt for `pin_prefix` seconds. It is
best-effort: all pins are broken when a request cannot continue without their blocks, and none is made for
more time or blocks than pins may have (`scheduling/accounts/kv_holdings.py`). A *transfer* keeps the blocks
of a finished request for a peer that reads them. It is guaranteed, and ends when the peer is done or sends no
heartbeat for `kv_transfer_timeout` seconds. Leases end in `schedule()`, for which an idle engine wakes when
the next is due (`next_due`).
"""
