"""Blocks that their owner lends to peers."""
