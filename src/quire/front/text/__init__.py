"""Text to tokens and back: input processing, detokenization, and stop strings."""
