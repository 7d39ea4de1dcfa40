"""What surrounds every request: middleware, browsers, and the root path."""
