"""The interface of `LLMDataDist`: sides, models, caches, and tasks."""
