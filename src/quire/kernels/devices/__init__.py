"""Devices: their memory, copies, graphs, and what torch knows of them."""
