"""Cache eviction beside the model: scores and evicted blocks."""
