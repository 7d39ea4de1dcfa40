"""KV of prompts that travels between engines: one computes and lends it, another reads it.

An engine that only prefills *lends* prompts' blocks to those that only decode, which *borrow* them, through
`PeerConnector` (`kv/peers/`) and the same links. `Loans` says which blocks of which prompt are ready, layer
by layer while a step computes them; a link's thread sends each part as soon as it is ready, and a borrower
takes what has arrived only if the loan has held to the end. Where a GPU computes, `LoanSteps` reports a
step to the loans once it has been computed, and a pull begins behind the steps that may still use its
blocks (`StepMark`, `kv/connectors/step_times.py`). Engines without such a role read each other's prefix
caches over the same links, by digest: `CachedBlocks` hears of every change of the cache as KV events do,
and instead of holding a block for a reader it reports afterwards whether the block was evicted. What
reads (`BorrowedPrompts`, `PeerPrefixes`) decides in the scheduler's thread; `RunningPulls` runs it,
`Peer` has threads that read what is ready and others that wait for the rest (`PullReaders`), and
`BlockLayouts` puts a peer's blocks together where they are smaller. The state of recurrent layers behind a
prompt travels as further blocks of its loan (`StateBlocks`), ready when the request ends; those of a prefix
cache are found by digests that follow from their blocks'. Blocks travel with all their KV heads in order;
`BlockLayouts` knows where those of several ranks are, at either end. docs/many-machines.md has the states of
all sides.
"""
