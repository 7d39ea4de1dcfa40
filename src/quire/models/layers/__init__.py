"""The types of sub-layers that decoders are made of, each with all that is to be known of it."""
