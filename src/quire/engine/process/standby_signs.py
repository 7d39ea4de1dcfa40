"""What a front and a spare engine process tell each other. Imports nothing that takes time."""

SPARE_OPTION = "--spare"
"""Has an engine process import what it needs before it reads its start message, which may never come."""

SPARE_IMPORTED = b"+"
"""What such a process writes to its standard output when it has imported everything."""
