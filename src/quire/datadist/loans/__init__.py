"""Blocks lent to peers by their owner."""
