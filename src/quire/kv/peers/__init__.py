"""KV of prompts that travels between engines: one computes and lends it, another reads it."""
