"""Checkpoints whose matrices are quantized already: how each kind stores them."""
