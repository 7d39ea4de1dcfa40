"""Where keys and values live: the logical side (blocks, hashes) and the physical (tensors)."""
