"""The types of sub-layers, each complete in one file."""
