"""`quire bench`: how fast an engine is, with all requests at once and with some that arrive by chance."""
