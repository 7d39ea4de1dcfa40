"""The logical KV cache: blocks, hashes, and who holds them. No tensors."""
