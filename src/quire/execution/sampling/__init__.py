"""Choosing tokens from logits, and their log-probabilities."""
