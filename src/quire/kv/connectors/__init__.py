"""The interface of KV connectors, and what they have in common."""
