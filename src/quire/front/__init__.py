"""Beside the client: requests and text in and out, clients of engines. Nothing here imports torch."""
