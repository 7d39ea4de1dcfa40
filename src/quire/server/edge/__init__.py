"""Middleware around every request: ids, keys, browser checks, and the root path."""
