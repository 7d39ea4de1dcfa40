"""JSON schemas made ready to be enforced."""
