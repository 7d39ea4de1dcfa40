"""Several engines as one server: which engine gets a request, and what happens when one fails.

`cluster/` routes requests to engines. `Engines.choose` weighs load against what an engine has cached of a
prompt, by the text that it was sent (`PrefixMemory`), or by its KV events: a `KVEventFeed` for each engine
keeps its `EngineBlocks`, and `PrefixFinder` computes the digests of a prompt's blocks in threads. As long as
`Engine.blocks` is not None, all events are known to have been applied. docs/serving-split.md has the formula.
KV that was computed for a request which no decode engine serves is freed at once, beside the request
(`KVReleases`). A stored response is kept by the engine that gave it, and the router does not know which: it
asks its engines in turn until one has it (`stored_responses.py`).
"""
