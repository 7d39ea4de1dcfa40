"""The caches of one side: descriptions, memory, and the spans of bytes to transfer."""
