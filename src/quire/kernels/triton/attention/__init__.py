"""Paged attention, rotary embeddings and key scores in Triton."""
