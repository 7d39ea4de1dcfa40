"""Tensor parallelism: the processes that compute the shards of a model, beside the engine's own, rank 0."""
