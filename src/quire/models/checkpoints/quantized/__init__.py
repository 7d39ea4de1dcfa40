"""Quantized checkpoints: their storage formats."""
