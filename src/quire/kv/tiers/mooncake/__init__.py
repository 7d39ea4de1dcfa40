"""A tier over a Mooncake store, which many engines share."""
