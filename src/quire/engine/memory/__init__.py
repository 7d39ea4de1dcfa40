"""The memory that an engine needs, and checks that it is available."""
