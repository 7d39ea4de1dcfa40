"""Building an engine from its configuration."""
