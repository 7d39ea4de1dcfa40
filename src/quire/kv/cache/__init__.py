"""The physical KV cache: its layout, its memory, and views of its layers."""
