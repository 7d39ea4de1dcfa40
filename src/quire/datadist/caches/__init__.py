"""Caches of one side: descriptions, memory, and which parts of it are moved."""
