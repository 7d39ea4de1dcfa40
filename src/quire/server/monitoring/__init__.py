"""The monitoring port, and figures for people."""
