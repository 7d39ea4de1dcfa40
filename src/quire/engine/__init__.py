"""One engine: its step loop, its processes, and the Python front doors."""
