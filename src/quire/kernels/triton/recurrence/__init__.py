"""Layers with a state in Triton."""
