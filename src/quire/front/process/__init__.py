"""The engine process as the front sees it: launch, messages, supervision, and recovery."""
