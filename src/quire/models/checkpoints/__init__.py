"""Model files: formats, and loading into packed weights."""
