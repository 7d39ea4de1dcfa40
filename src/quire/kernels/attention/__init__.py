"""Paged attention: the ragged batch, its tiles, and the layers of the KV cache."""
