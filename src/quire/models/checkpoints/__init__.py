"""Model files: their formats, and the way from them to packed weights."""
