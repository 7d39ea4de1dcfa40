"""Which engine has which prefix."""
