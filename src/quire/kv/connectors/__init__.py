"""The interface of KV connectors, and what they have in common.

A `KVConnector` (`kv/connectors/interface.py`) is one object with a scheduler side, which decides, and a
worker side, which moves data. A request that is about to start is offered to it with what the cache has of
its tokens:

1. *Nothing more to load*, or *not known yet*: the request starts, or is skipped in this step.
2. *A synchronous load*: the request starts, and its first step waits for the load, layer by layer.
3. *An asynchronous load*: the request leaves the queue with its blocks and waits in `WAITING_FOR_REMOTE_KVS`.
   When the load has ended, it goes back to the queue and keeps the blocks.

Prompts that come in a burst are loaded once: a request that would begin with at least half of the blocks that
are on their way for another one waits for those (`RemoteLoads.covering`), up to loads of 2,048 blocks. Beside
windows that must be all of them, since a load brings only what the tokens behind it see there. If a block of
it fails, it is cut off where all cache groups still serve it, often where the local prefix ends. What has
arrived is in the prefix cache at once. A request that names where its own KV is (`kv_transfer_params`) does
not wait, and one waits for one load only, so that silent peers do not hold it up one after the other.

With recurrent layers, a load also brings the state behind it, into a checkpoint that is pending until then;
if any of it fails, what has arrived is in the prefix cache, and the request begins where that has a state.
Prompts that share a load share all of it then.

If blocks fail to load, what was computed from them is discarded, and `kv_load_failure` decides what happens
next: *recompute* sends the request back to the queue without asking the connector again (of an asynchronous
load it keeps the blocks before the first that failed); *fail* ends it. A load without a sign of life for
`kv_transfer_timeout` seconds is cancelled and counts as failed, and so does one that was asked for in a step
that failed: the connector may not have received it. When a request ends, the connector may ask to hold
its blocks for a peer: a transfer lease. docs/kv-connectors.md explains how to write one.
"""
