"""What a front and a standby engine process tell each other. Imports nothing that takes time."""

STANDBY_OPTION = "--standby"
"""Has an engine process import what it needs before it reads its start message, which may never come."""

STANDBY_IMPORTED = b"+"
"""What such a process writes to its standard output when it has imported everything."""
