"""Tensor parallelism: the processes that compute the shards of a model, beside the engine's own, rank 0.

With `tensor_parallel_size` above 1, the engine process is rank 0, and `engine/ranks/` starts one process for
each other rank. `models/shard.py` says what a rank holds of a model (`Shard`), `models/parallel.py` what
ranks compute together: layers that wrap a rank's own `Linear` objects and exchange tensors through a
`Communicator`. So `Decoder.forward` is the same code, with the rank's share of heads and inner features as
its `ModelConfig`. Only four calls of the `ModelRunner` reach the other ranks: `forward`, `logits`,
`whole_step` and `copy_blocks` (`ranks/leading.py`). Whatever else a step does, scheduling and sampling
included, is rank 0's alone, and the other ranks keep nothing from step to step but weights, KV, and
captures of steps. Plans are messages; tensors that may be on a device only, such as token ids, rank 0
broadcasts. `whole_step` is for steps that may be captured: one message for all of it, after which each rank
goes through `StepGraphs` of its own with `RankDecoder` (`ranks/rank_decoder.py`). What these do follows from
the batches, so that it is the same everywhere; whether a capture has succeeded is agreed.
`GroupCommunicator` (`ranks/process_group.py`) moves bytes through a process group of torch: `gloo.py` on the
host, `nccl.py` on GPUs, one for each rank.

Each rank has a socket to rank 0. It carries these calls, and what the rank reports; its end is how one
notices that the other has died. On GPUs nobody waits for an exchange, and so `RankWatch` asks since when the
oldest has not ended, and aborts them after any failure; the step then goes on with numbers that mean nothing,
and `EngineCore.step` drops them. After any failure no further step can be computed, since shards would miss
KV: `EngineDeadError` goes through the stepper and ends the loop. docs/tensor-parallel.md tells users the
rest.

An engine that shares KV with others has the caches of all ranks in one file in memory
(`kv/cache/shard_memory.py`), which each rank maps. So rank 0 alone reads, fills and copies blocks, for all
ranks. What rank 0 knows to be computed is computed everywhere, since it adds up what the ranks' attention
gives in each layer; and a rank uses KV only in a forward pass.
"""
