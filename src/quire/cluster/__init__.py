"""Several engines as one server: which engine gets a request, and what happens when one fails.

`cluster/` routes requests to engines. `Engines.choose` weighs load against the cached part of a prompt, known
from the texts that an engine was sent (`PrefixMemory`) or from its KV events: a `KVEventFeed` for each engine
keeps its `EngineBlocks`, and `PrefixFinder` computes the digests of a prompt's blocks in threads. While
`Engine.blocks` is not None, all events are known to have been applied. docs/many-machines.md has the formula.
Engines may serve different models: each says which in `GET /engine`, and a request goes to those with the
model that it names (`models.py`). KV computed for a request that no decode engine serves is freed at once, in
the background (`KVReleases`). A stored response, a file or a batch is kept by the engine that created it, and
the router does not know which: it asks its engines in turn until one has it (`owners.py`), and merges their
lists (`files.py`).
"""
