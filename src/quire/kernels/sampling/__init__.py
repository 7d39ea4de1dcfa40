"""Interfaces of the kernels that choose tokens."""
