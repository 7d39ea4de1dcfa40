"""Transports for the bytes of caches, behind one interface."""
