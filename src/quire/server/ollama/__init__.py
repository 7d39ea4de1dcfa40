"""Ollama's API, translated to the engine and back."""
