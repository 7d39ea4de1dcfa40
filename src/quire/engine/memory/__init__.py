"""What an engine needs of memory, and whether it is there."""
