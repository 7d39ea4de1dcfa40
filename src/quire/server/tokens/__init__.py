"""Tokens in and out, in vLLM's shapes: tokenization, rendering of prompts, and generation from token ids."""
