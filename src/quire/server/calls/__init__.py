"""Shared parts of all generation APIs: from a body to requests, and from outputs to an answer."""
