"""`quire bench`: offline throughput, batch latency, and serving under load."""
