"""Choosing tokens in Triton."""
