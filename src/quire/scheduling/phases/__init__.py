"""The phases of a step: arrivals, admission, running requests, commit, and results."""
